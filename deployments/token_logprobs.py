"""Log-probabilities in OpenAI's two shapes: a chat's objects, a completion's four lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .answer import TokenEntry
from .json_body import JsonObject

if TYPE_CHECKING:
    from ..runtime.tokenizer import Tokenizer

LEAST = -9999.0  # stands for minus infinity, which JSON has no word for


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text; half characters as `bytes:\\xe2\\x82`, so that names stay distinct."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(tokens: Iterable[TokenEntry], tokenizer: Tokenizer) -> JsonObject:
    """`logprobs` of a chat choice; the end token is left out, as its text is."""
    content: list[JsonObject] = []
    for entry in tokens:
        if entry.is_end or entry.logprob is None:
            continue
        item = _named(tokenizer, entry.token_id, entry.logprob.logprob)
        item["top_logprobs"] = [
            _named(tokenizer, token_id, logprob) for token_id, logprob in entry.logprob.top
        ]
        content.append(item)
    return {"content": content, "refusal": None}


def _named(tokenizer: Tokenizer, token_id: int, logprob: float) -> JsonObject:
    return {
        "token": token_name(tokenizer, token_id),
        "logprob": max(logprob, LEAST),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def completion_logprobs(
    tokens: Sequence[TokenEntry], tokenizer: Tokenizer, *, shift: int = 0
) -> JsonObject:
    """`logprobs` of a completion choice. `shift`: characters of echoed prompt before the answer."""
    return {
        "tokens": [token_name(tokenizer, entry.token_id) for entry in tokens],
        "token_logprobs": [
            None if entry.logprob is None else max(entry.logprob.logprob, LEAST) for entry in tokens
        ],
        "top_logprobs": [_rivals(entry, tokenizer) for entry in tokens],
        "text_offset": [entry.offset + shift for entry in tokens],
    }


def _rivals(entry: TokenEntry, tokenizer: Tokenizer) -> dict[str, float] | None:
    """The likeliest tokens by name, and the chosen one always."""
    if entry.logprob is None:
        return None
    rivals: dict[str, float] = {}
    for token_id, logprob in (*entry.logprob.top, (entry.token_id, entry.logprob.logprob)):
        rivals.setdefault(token_name(tokenizer, token_id), max(logprob, LEAST))
    return rivals


def join_completion_logprobs(first: JsonObject, second: JsonObject) -> JsonObject:
    """Two stretches of one choice as one."""
    return {key: [*_as_list(first[key]), *_as_list(second[key])] for key in first}


def _as_list(value: object) -> list[object]:
    assert isinstance(value, list), "each field of completion logprobs is a list"
    return value
