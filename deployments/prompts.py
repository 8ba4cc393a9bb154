"""Prompts as token ids: texts, ids and chats; what is slow runs in threads, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ..runtime.errors import ContextLengthError, QueueFullError, RequestError
from .json_body import JsonObject, json_type
from .messages import read_messages
from .sampling import check_prompt_len
from .schema import found_value

if TYPE_CHECKING:
    from ..runtime.chat_template import ChatTemplate
    from ..runtime.tokenizer import Tokenizer

Result = TypeVar("Result")
MAX_ASIDE = 64  # texts that wait to be tokenized for their own sake: prompts wait behind them
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
        self._num_aside = 0
        self.max_token_bytes = max(
            len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size)
        )

    async def run(self, function: Callable[[], Result]) -> Result:
        """Run a slow, pure function in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around work that no answer waits for. Raises `QueueFullError` when there is much."""
        if self._num_aside >= MAX_ASIDE:
            raise QueueFullError(
                f"{self._num_aside} texts wait to be tokenized here, which is the limit; try again "
                "later",
                1.0,
            )
        self._num_aside += 1
        try:
            yield
        finally:
            self._num_aside -= 1

    def close(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def check_fits(self, num_bytes: int, max_model_len: int, param: str) -> None:
        """Refuse a text that cannot fit whatever its tokens are, before tokenizing it.

        No token covers more bytes than the longest one does.
        """
        most = max_model_len * self.max_token_bytes
        most *= NORMALIZER_SHRINK if self.tokenizer.normalizes else 1
        if num_bytes > most:
            raise ContextLengthError(
                f"{param} has {num_bytes} bytes of text; the context holds {max_model_len} tokens, "
                f"which is at most {most} bytes. Shorten it.",
                param,
            )

    async def read_chat(
        self,
        messages: Sequence[object],
        *,
        add_generation_prompt: bool,
        template_kwargs: JsonObject,
        max_model_len: int,
    ) -> tuple[Prompt, bool]:
        """A chat as one prompt, and whether its history has tool calls.

        Control words that users typed stay plain characters. Raises `RequestError`.
        """
        template = self.chat_template
        assert template is not None, "the caller refuses chats of a model without a template"

        def read() -> tuple[Prompt, bool]:
            conversation = read_messages(messages)
            self.check_fits(conversation.num_bytes, max_model_len, "messages")
            ids = template.encode(
                conversation.messages,
                self.tokenizer,
                add_generation_prompt=add_generation_prompt,
                extra=template_kwargs,
            )
            if not ids:
                raise RequestError("messages render to no token; send some text", "messages")
            return Prompt(tuple(ids)), conversation.has_tool_calls

        return await self.run(read)

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

        def read() -> list[Prompt]:
            items = _items(prompt)
            for param, item in items:
                if isinstance(item, str):
                    self.check_fits(len(item.encode()), max_model_len, param)
            return [
                self._encode(item, param, add_special_tokens)
                if isinstance(item, str)
                else self._ids(item, param, vocab_size, max_model_len, needs_text)
                for param, item in items
            ]

        return await self.run(read)

    def _ids(
        self, items: object, param: str, vocab_size: int, max_model_len: int, needs_text: bool
    ) -> Prompt:
        assert isinstance(items, list), "what is no text is a list"
        if not items:
            raise RequestError(f"{param} has no token; send at least one", param)
        check_prompt_len(len(items), max_model_len, param)
        ids = [
            _token_id(item, f"{param}[{number}]", vocab_size) for number, item in enumerate(items)
        ]
        if not needs_text:
            return Prompt(tuple(ids))
        # The first token that the tokenizer would add is no part of a text.
        is_added = self.tokenizer.adds_bos and ids[0] == self.tokenizer.bos_id
        text = self.tokenizer.decode(ids[is_added:], skip_special_tokens=False)
        return Prompt(tuple(ids), text)

    def _encode(self, text: str, param: str, add_special_tokens: bool) -> Prompt:
        ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if not ids:
            raise RequestError(f"{param} has no token; send at least one", param)
        return Prompt(tuple(ids), text)


def count_prompts(prompt: object) -> int:
    """How many prompts a completion's `prompt` holds, as far as can be told without reading it."""
    is_list = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    return len(prompt) if is_list and isinstance(prompt, list) else 1


def _items(prompt: object) -> list[tuple[str, object]]:
    """Each text or id list of a `prompt`, with the path that names it in errors."""
    if isinstance(prompt, str):
        return [("prompt", prompt)]
    if not isinstance(prompt, list):
        raise RequestError(
            f"prompt is {json_type(prompt)}; it must be a string, a list of strings, "
            "a list of token ids, or a list of such lists",
            "prompt",
        )
    if not prompt:
        raise RequestError("prompt is an empty list; send at least one prompt or token", "prompt")
    if not isinstance(prompt[0], str | list):
        return [("prompt", prompt)]
    kind, name = (str, "strings") if isinstance(prompt[0], str) else (list, "lists of token ids")
    for number, item in enumerate(prompt):
        if not isinstance(item, kind):
            path = f"prompt[{number}]"
            raise RequestError(
                f"{path} is {json_type(item)}; it must be like the first: {name} only", path
            )
    return [(f"prompt[{number}]", item) for number, item in enumerate(prompt)]


def _token_id(value: object, path: str, vocab_size: int) -> int:
    """A token id as JSON writes it: 5 or 5.0."""
    token_id = int(value) if isinstance(value, float) and value.is_integer() else value
    if not isinstance(token_id, int) or isinstance(token_id, bool):
        raise RequestError(f"{path} is {found_value(value)}; it must be a token id", path)
    if not 0 <= token_id < vocab_size:
        raise RequestError(f"{path} is {token_id}; token ids are 0 to {vocab_size - 1}", path)
    return token_id
