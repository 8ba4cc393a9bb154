"""Prompts as token ids: texts, ids and chats; what is slow runs in threads, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ..runtime.errors import ContextLengthError, RequestError
from .json_body import JsonObject, json_type
from .messages import Conversation
from .schema import found_value

if TYPE_CHECKING:
    from ..runtime.chat_template import ChatTemplate
    from ..runtime.tokenizer import Tokenizer

Result = TypeVar("Result")
NORMALIZER_SHRINK = 4  # bytes of text that a normalizer may fold into one byte (NFC at its worst)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its ids, and the text that `echo` returns."""

    ids: tuple[int, ...]
    text: str = ""


class PromptReader:
    """One model's tokenizer and chat template, with a small pool of threads to run them in."""

    def __init__(
        self, tokenizer: Tokenizer, chat_template: ChatTemplate | None, *, num_threads: int = 2
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")
        self.max_token_bytes = max(
            len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size)
        )

    async def run(self, function: Callable[[], Result]) -> Result:
        """Run a slow, pure function in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    def close(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def check_fits(self, num_bytes: int, max_model_len: int, param: str) -> None:
        """Refuse a text that cannot fit whatever its tokens are, before tokenizing it.

        No token covers more bytes than the longest one does.
        """
        most = max_model_len * self.max_token_bytes * NORMALIZER_SHRINK
        if num_bytes > most:
            raise ContextLengthError(
                f"{param} has {num_bytes} bytes of text; the context holds {max_model_len} tokens, "
                f"which is at most {most} bytes. Shorten it.",
                param,
            )

    async def read_chat(
        self,
        conversation: Conversation,
        *,
        add_generation_prompt: bool,
        template_kwargs: JsonObject,
        max_model_len: int,
    ) -> Prompt:
        """Render and tokenize a chat; control words that users typed stay plain characters."""
        self.check_fits(conversation.num_bytes, max_model_len, "messages")
        template = self.chat_template
        assert template is not None, "the caller refuses chats of a model without a template"
        ids = await self.run(
            lambda: template.encode(
                conversation.messages,
                self.tokenizer,
                add_generation_prompt=add_generation_prompt,
                extra=template_kwargs,
            )
        )
        if not ids:
            raise RequestError("messages render to no token at all; send some text", "messages")
        return Prompt(tuple(ids))

    async def read_text(self, text: str, add_special_tokens: bool, max_model_len: int) -> Prompt:
        """A raw text, which may be empty; control words in it become control tokens."""
        self.check_fits(len(text.encode()), max_model_len, "prompt")
        ids = await self.run(
            lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )
        return Prompt(tuple(ids), text)

    async def read_prompts(
        self,
        prompt: object,
        *,
        add_special_tokens: bool,
        vocab_size: int,
        max_model_len: int,
        needs_text: bool,
    ) -> list[Prompt]:
        """`prompt` of a completion: a text, a list of texts, ids, or a list of id lists.

        `needs_text`: ids are turned into text too, for `echo`.
        """
        texts, id_lists = _split(prompt)
        for param, ids in id_lists:
            _check_ids(ids, param, vocab_size)
        for param, text in texts:
            self.check_fits(len(text.encode()), max_model_len, param)
        if not needs_text and id_lists:
            return [Prompt(tuple(ids)) for _, ids in id_lists]
        return await self.run(
            lambda: (
                [self._encode(text, param, add_special_tokens) for param, text in texts]
                + [Prompt(tuple(ids), self.tokenizer.decode(ids)) for _, ids in id_lists]
            )
        )

    def _encode(self, text: str, param: str, add_special_tokens: bool) -> Prompt:
        ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if not ids:
            raise RequestError(f"{param} has no token; send at least one", param)
        return Prompt(tuple(ids), text)


def _split(prompt: object) -> tuple[list[tuple[str, str]], list[tuple[str, list[int]]]]:
    """The texts, or the id lists, of a `prompt`, each with the path that names it in errors."""
    if isinstance(prompt, str):
        return [("prompt", prompt)], []
    if not isinstance(prompt, list):
        raise RequestError(
            f"prompt is {json_type(prompt)}; it must be a string, a list of strings, "
            "a list of token ids, or a list of such lists",
            "prompt",
        )
    if not prompt:
        raise RequestError("prompt is an empty list; send at least one prompt or token", "prompt")
    if _as_id(prompt[0]) is not None:
        return [], [("prompt", _ids(prompt, "prompt"))]
    if isinstance(prompt[0], list):
        paths = [f"prompt[{number}]" for number in range(len(prompt))]
        return [], [(path, _ids(item, path)) for path, item in zip(paths, prompt, strict=True)]
    texts: list[tuple[str, str]] = []
    for number, item in enumerate(prompt):
        if not isinstance(item, str):
            raise RequestError(
                f"prompt[{number}] is {json_type(item)}; a list of prompts holds strings only, "
                "or lists of token ids only",
                f"prompt[{number}]",
            )
        texts.append((f"prompt[{number}]", item))
    return texts, []


def _as_id(value: object) -> int | None:
    """A token id as JSON writes it: 5 or 5.0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        return None
    return int(value)


def _ids(items: object, path: str) -> list[int]:
    if not isinstance(items, list):
        raise RequestError(f"{path} is {json_type(items)}; it must be a list of token ids", path)
    if not items:
        raise RequestError(f"{path} has no token; send at least one", path)
    ids: list[int] = []
    for number, item in enumerate(items):
        token_id = _as_id(item)
        if token_id is None:
            where = f"{path}[{number}]"
            raise RequestError(f"{where} is {found_value(item)}; it must be a token id", where)
        ids.append(token_id)
    return ids


def _check_ids(ids: Sequence[int], path: str, vocab_size: int) -> None:
    for number, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{path}[{number}] is {token_id}; token ids are 0 to {vocab_size - 1}",
                f"{path}[{number}]",
            )
