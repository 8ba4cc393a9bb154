"""The tokenizer and chat templates that a GGUF file carries in its metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from ..pieces import BLANK
from ..tokenizer import Tokenizer
from .config_values import ConfigValues
from .gguf_file import GgufFile
from .pre_tokenizers import ASSUMED, PRE_TOKENIZERS, PreTokenizer, apply_pre_tokenizer

if TYPE_CHECKING:
    import tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # token types
MODELS = "gpt2 (byte-level BPE) and llama (SentencePiece)"
_ROLE_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
TEMPLATE = "tokenizer.chat_template"


def gguf_tokenizer(file: GgufFile, eos_ids: tuple[int, ...], vocab_size: int) -> Tokenizer:
    """The file's tokenizer. Raises ModelError for kinds and pre-tokenizers that we do not know, by
    name.
    """
    values = ConfigValues(file.metadata, str(file.path))
    tokens = _tokens(values, vocab_size)
    kind = values.get("tokenizer.ggml.model")
    if kind == "gpt2":
        rule = _pre_tokenizer(values)
        backend, adds_bos = _byte_level(values, tokens, rule), rule.adds_bos
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(values, tokens), True
    else:
        raise ModelError(f"{file.path}: tokenizer model {kind!r} is not supported; {MODELS} are.")
    roles = _roles(values, tokens)
    _add_marked(backend, values, tokens, roles)
    adds_bos = values.flag("tokenizer.ggml.add_bos_token", adds_bos)
    adds_eos = values.flag("tokenizer.ggml.add_eos_token", False)
    _set_frame(
        backend,
        roles.get("bos_token") if adds_bos else None,
        roles.get("eos_token") if adds_eos else None,
    )
    return Tokenizer(backend, special_tokens=roles, eos_ids=eos_ids)


def gguf_text_facts(file: GgufFile) -> list[str]:
    """What had to be assumed, one line each."""
    kind, pre = file.metadata.get("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre")
    facts = []
    if kind == "gpt2" and pre is None:
        facts.append(f"pre-tokenizer: the file names none, {ASSUMED} is assumed")
    if kind == "llama":
        facts.append(
            "tokenizer: SentencePiece, a blank is put in front of a text and after control words"
        )
    return facts


def check_gguf_text(file: GgufFile) -> None:
    """Refuses an unknown tokenizer when the file is opened, before weights load."""
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ModelError(f"{file.path}: tokenizer model {kind!r} is not supported; {MODELS} are.")
    if kind == "gpt2":
        _pre_tokenizer(ConfigValues(file.metadata, str(file.path)))


def gguf_templates(file: GgufFile) -> dict[str, str]:
    """Chat templates by name; the unnamed one is `default`."""
    found = {
        key.removeprefix(TEMPLATE).removeprefix(".") or "default": text
        for key, text in file.metadata.items()
        if (key == TEMPLATE or key.startswith(TEMPLATE + ".")) and isinstance(text, str)
    }
    return found


def _tokens(values: ConfigValues, vocab_size: int) -> list[str]:
    tokens = values.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError(f"{values.file} carries no tokenizer (tokenizer.ggml.tokens is missing).")
    if len(tokens) > vocab_size:
        raise ModelError(
            f"{values.file} lists {len(tokens)} tokens for {vocab_size} embeddings: it is not "
            "whole."
        )
    return tokens


def _pre_tokenizer(values: ConfigValues) -> PreTokenizer:
    name = values.get("tokenizer.ggml.pre") or ASSUMED
    if name not in PRE_TOKENIZERS:
        raise ModelError(
            f"{values.file}: pre-tokenizer {name!r} is unknown, and a wrong one would split text "
            "differently; the known"
            f" ones are {', '.join(PRE_TOKENIZERS)}."
        )
    return PRE_TOKENIZERS[name]


def _byte_level(
    values: ConfigValues, tokens: list[str], rule: PreTokenizer
) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    merges = [_pair(each, values) for each in values.get("tokenizer.ggml.merges") or ()]
    vocab = _vocab(tokens)
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.ignore_merges)
    except Exception as error:  # tokenizers raises plain Exception for merges that do not fit
        raise ModelError(f"{values.file}: its tokenizer does not fit together: {error}.") from None
    backend = Backend(model)
    apply_pre_tokenizer(backend, rule)
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return backend


def _sentencepiece(values: ConfigValues, tokens: list[str]) -> tokenizers.Tokenizer:
    """As llama.cpp reads it, and the tokenizer.json of Llama 2, TinyLlama and Mistral 7B.

    transformers 5.24 puts its blank elsewhere when it reads such a GGUF: never before a blank, nor
    after a control word.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    prefix = values.flag("tokenizer.ggml.add_space_prefix", True)
    vocab = _vocab(tokens)
    unknown = _roles(values, tokens).get("unk_token")
    model = models.BPE(
        vocab=vocab,
        merges=_derived_merges(values, vocab, tokens),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Backend(model)
    changes: list[Any] = [normalizers.Prepend(BLANK)] if prefix else []
    changes.append(normalizers.Replace(" ", BLANK))
    backend.normalizer = normalizers.Sequence(changes)  # pyright: ignore[reportAttributeAccessIssue]
    steps: list[Any] = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    backend.decoder = decoders.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
    return backend


def _derived_merges(
    values: ConfigValues, vocab: dict[str, int], tokens: list[str]
) -> list[tuple[str, str]]:
    """SentencePiece files hold scores: two pieces merge if they make a token, better scores first.

    The same order as transformers' `generate_merges`, ties included.
    """
    scores = values.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelError(f"{values.file}: tokenizer.ggml.scores must hold one score a token.")
    merges: list[tuple[float, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [(left, right) for left, right in cuts if left in vocab and right in vocab]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges.extend((score, left, right) for left, right in pairs)
    merges.sort(key=lambda each: (each[0], len(each[1]), len(each[2])), reverse=True)
    return [(left, right) for _, left, right in merges]


def _vocab(tokens: list[str]) -> dict[str, int]:
    """Token to id; of two equal tokens the first keeps its name, so every id stays in range."""
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(vocab) == len(tokens):
        return vocab
    vocab = {}
    for token_id, token in enumerate(tokens):
        name = token if token not in vocab else f"<duplicate {token_id}>"
        vocab[name] = token_id
    return vocab


def _pair(merge: str, values: ConfigValues) -> tuple[str, str]:
    left, blank, right = merge.partition(" ")
    if not blank:
        raise ModelError(f"{values.file}: {merge!r} in tokenizer.ggml.merges is no pair.")
    return left, right


def _roles(values: ConfigValues, tokens: list[str]) -> dict[str, str]:
    roles = {}
    for role, key in _ROLE_KEYS.items():
        for token_id in values.token_ids(f"tokenizer.ggml.{key}"):
            if token_id >= len(tokens):
                raise ModelError(
                    f"{values.file}: tokenizer.ggml.{key} is {token_id}, beyond its {len(tokens)} "
                    "tokens."
                )
            roles[role] = tokens[token_id]
    return roles


def _set_frame(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """What encoding adds in front and behind, replacing what the tokenizer did so far."""
    from tokenizers import processors

    tokens = [text for text in (bos, eos) if text is not None]
    single = " ".join([*([f"{bos}:0"] if bos else []), "$A:0", *([f"{eos}:0"] if eos else [])])
    pairs = [(text, backend.token_to_id(text)) for text in dict.fromkeys(tokens)]
    # pyright: ignore[reportAttributeAccessIssue]
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=f"{single} $B:1", special_tokens=pairs
    )


def _add_marked(
    backend: tokenizers.Tokenizer, values: ConfigValues, tokens: list[str], roles: dict[str, str]
) -> None:
    """Control tokens become special ones, user-defined ones (`<think>`) plain added ones: neither
    is ever cut up.
    """
    from tokenizers import AddedToken

    types = values.get("tokenizer.ggml.token_type") or []
    marked = list(zip(tokens, types, strict=False))
    special = dict.fromkeys([token for token, kind in marked if kind == CONTROL and token])
    special |= dict.fromkeys(roles.values())
    user = [token for token, kind in marked if kind == USER_DEFINED and token not in special]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in user if t])
