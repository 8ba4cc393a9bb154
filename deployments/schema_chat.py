"""The body of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from .schema import GenerationBody, Integer, Refused
from .schema_refused import GENERATION_REFUSED, TEMPLATE_REFUSED, TOOLS_WHY


class ChatBody(GenerationBody):
    """A chat request. `messages` are checked one by one in messages.py."""

    messages: list[Any] = Field()
    max_completion_tokens: Integer | None = None
    logprobs: bool = False
    top_logprobs: Integer | None = None
    tools: list[Any] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    # accepted, and change nothing here
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None

    refused: ClassVar[Mapping[str, Refused]] = {
        **GENERATION_REFUSED,
        **TEMPLATE_REFUSED,
        "store": Refused("nothing is stored here.", False),
        "audio": Refused("models here read and write text only."),
        "modalities": Refused("models here read and write text only.", ["text"]),
        "web_search_options": Refused("this server does not search the web.", {}),
        "reasoning_effort": Refused(
            "a template's own switches are set with chat_template_kwargs.", "none"
        ),
        "verbosity": Refused("the model knows no such switch.", "medium"),
        "prediction": Refused("predicted outputs are not built."),
        "functions": Refused(TOOLS_WHY, []),
        "function_call": Refused(TOOLS_WHY, "none", "auto"),
        "echo": Refused("a chat has no echo; use /v1/completions.", False),
        "add_special_tokens": Refused("the chat template writes the special tokens.", False),
        "thinking_token_budget": Refused("the model knows no such switch."),
    }
