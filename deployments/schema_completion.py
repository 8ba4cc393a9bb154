"""The bodies of `/v1/completions`, `/tokenize` and `/detokenize`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from .schema import Body, GenerationBody, Integer, Integers, Refused
from .schema_refused import GENERATION_REFUSED, TEMPLATE_REFUSED


class CompletionBody(GenerationBody):
    """A completion request. `prompt` is checked item by item in prompts.py."""

    prompt: Any = Field()
    logprobs: Integer | None = None
    echo: bool = False
    best_of: Integer | None = None
    add_special_tokens: bool = True

    refused: ClassVar[Mapping[str, Refused]] = {
        **GENERATION_REFUSED,
        "suffix": Refused("models here do not fill in the middle.", ""),
        "prompt_embeds": Refused("prompts are text or token ids."),
    }


class TokenizeBody(Body):
    """`prompt` (raw text: control words in it count as such) or `messages` (a chat)."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    tools: list[Any] = Field(default_factory=list)
    return_token_strs: bool = False

    refused: ClassVar[Mapping[str, Refused]] = TEMPLATE_REFUSED


class DetokenizeBody(Body):
    """Token ids to turn back into text."""

    model: str | None = None
    tokens: Integers = Field()
