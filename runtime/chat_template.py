"""A model's chat template: messages to the text, and to the ids, that the model reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from .chat_messages import map_texts, prepare_messages
from .errors import ModelError, RequestError
from .template_facts import TemplateFacts, read_facts
from .template_sandbox import TEMPLATE_ERRORS, TIME_LIMIT_S, CompiledTemplate

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]  # JSON objects, as clients send them
Tools = Sequence[Mapping[str, Any]]
DEFAULT, TOOL_USE = "default", "tool_use"
OPTION = "--chat-template"


class ChatTemplate:
    """One or several named templates. As in transformers `tool_use` is taken when tools are given,
    else `default`.

    `source` says where it comes from. Raises ModelError when one does not compile.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        source: str,
        time_limit_s: float = TIME_LIMIT_S,
    ) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._time_limit_s = time_limit_s
        self._compiled = {name: _compile(text, name, source) for name, text in templates.items()}
        self._facts = {name: read_facts(text) for name, text in templates.items()}
        if DEFAULT not in self._compiled and TOOL_USE not in self._compiled:
            raise ModelError(
                f"{source} has the chat templates {', '.join(templates)} but none named {DEFAULT};"
                " choose one with"
                f" {OPTION}."
            )

    @property
    def supports_tools(self) -> bool:
        """Whether tools that a request offers reach the prompt."""
        return any(facts.supports_tools for facts in self._facts.values())

    @property
    def supports_tool_calls(self) -> bool:
        """Whether tool calls in the history reach the prompt."""
        return any(facts.supports_tool_calls for facts in self._facts.values())

    @property
    def wants_parts(self) -> bool:
        """Whether content must be a list of parts; otherwise parts are joined with nothing between
        them.
        """
        return self._facts_of(None).wants_parts

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text. `extra` are further variables (`enable_thinking` ...).

        Raises RequestError with the template's own sentence when it refuses the messages or runs
        over its limits.
        """
        prepared = prepare_messages(messages, self._facts_of(tools).wants_parts)
        return self._render(prepared, add_generation_prompt, tools, extra)

    def encode(
        self,
        messages: Messages,
        tokenizer: Tokenizer,
        *,
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
        extra: Mapping[str, Any] | None = None,
        parse_special_in_content: bool = False,
    ) -> list[int]:
        """The prompt as ids. The template alone writes the first token: none is added.

        Control words that users typed stay plain characters, unless `parse_special_in_content`:
        special tokens everywhere,
        and outside the assistant's turns also other added tokens that the template itself writes
        (`<tool_response>`).
        """
        facts = self._facts_of(tools)
        prepared = prepare_messages(messages, facts.wants_parts)
        if parse_special_in_content:
            text = self._render(prepared, add_generation_prompt, tools, extra)
            return tokenizer.encode(text, add_special_tokens=False)
        words = tokenizer.special_texts
        more = words | {word for word in tokenizer.added_texts if word in facts.literals}

        def hide(value: Any, used: frozenset[str]) -> Any:
            return map_texts(value, lambda text: tokenizer.protect(text, used))

        hidden = [
            hide(message, words if message.get("role") == "assistant" else more)
            for message in prepared
        ]
        hidden_tools, hidden_extra = hide(tools, more), hide(extra, words)
        text = self._render(hidden, add_generation_prompt, hidden_tools, hidden_extra)
        if (hidden, hidden_tools, hidden_extra) == (prepared, _plain(tools), _plain(extra)):
            return tokenizer.encode(text, add_special_tokens=False)
        return tokenizer.encode_protected(text)

    def _render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        tools: Tools | None,
        extra: Mapping[str, Any] | None,
    ) -> str:
        variables = {
            **self._special_tokens,
            **(extra or {}),
            "messages": messages,
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._compiled[self._name(tools)].render(variables, self._time_limit_s)
        except TEMPLATE_ERRORS as error:
            raise RequestError(_sentence(error), "messages") from None

    def _name(self, tools: Tools | None) -> str:
        if (tools and TOOL_USE in self._compiled) or DEFAULT not in self._compiled:
            return TOOL_USE
        return DEFAULT

    def _facts_of(self, tools: Tools | None) -> TemplateFacts:
        return self._facts[self._name(tools)]


def open_override(option: str) -> tuple[str, str]:
    """(template, source) of what the user named: a file, or the template itself."""
    if "{" in option:
        return option, OPTION
    path = Path(option).expanduser()
    try:
        return path.read_text(encoding="utf-8"), f"{OPTION} {option}"
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"{OPTION}: {option} cannot be read as a template file: {error}."
        ) from None


def _compile(text: str, name: str, source: str) -> CompiledTemplate:
    try:
        return CompiledTemplate(text)
    except (jinja2.TemplateError, RecursionError) as error:
        line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise ModelError(
            f"The chat template {name!r} of {source} does not compile: {error}{line}; give another"
            f" with {OPTION}."
        ) from None


def _plain(value: Any) -> Any:
    return map_texts(value, lambda text: text)


def _sentence(error: BaseException) -> str:
    """The template's own words where it raised on purpose, otherwise what went wrong in it."""
    if type(error) is jinja2.TemplateError:
        return str(error)
    return f"the chat template cannot render these messages: {error or type(error).__name__}"
