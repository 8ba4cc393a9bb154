"""Chat messages in the one form that templates read: text content, parsed tool arguments, no
nulls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .errors import RequestError

JsonObject = dict[str, Any]  # any JSON value may stand in it
_REASONING = ("reasoning_content", "thinking", "reasoning")
_NEVER_TYPED = ("role", "type")  # fields whose words are ours, not a user's


def prepare_messages(messages: Sequence[Mapping[str, Any]], wants_parts: bool) -> list[JsonObject]:
    """Fresh messages fit for a template. Raises RequestError naming the message or part.

    Null and absent content are the empty text. Text parts are joined with nothing between them,
    unless the template
    wants parts. As in transformers, keys with null go and reasoning is found under each of its
    names.
    """
    return [_prepare(message, f"messages[{n}]", wants_parts) for n, message in enumerate(messages)]


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The JSON value with every string changed, but keys, roles and types."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {k: v if k in _NEVER_TYPED else map_texts(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(item, change) for item in value]
    return value


def _prepare(message: Mapping[str, Any], path: str, wants_parts: bool) -> JsonObject:
    if not isinstance(message, Mapping):
        raise RequestError(f"{path} is {message!r:.80}; it must be an object", path)
    prepared: JsonObject = {key: value for key, value in message.items() if value is not None}
    prepared["content"] = _content(prepared.get("content"), path, wants_parts)
    if "tool_calls" in prepared:
        prepared["tool_calls"] = [_tool_call(call) for call in prepared["tool_calls"]]
    reasoning = next((prepared[key] for key in _REASONING if prepared.get(key) is not None), None)
    if reasoning is not None:
        prepared = {"thinking": reasoning, **prepared, "reasoning_content": reasoning}
    return prepared


def _content(content: Any, path: str, wants_parts: bool) -> str | list[JsonObject]:
    if content is None:
        texts = []
    elif isinstance(content, str):
        texts = [content]
    elif isinstance(content, list):
        texts = [_part_text(part, f"{path}.content[{n}]") for n, part in enumerate(content)]
    else:
        raise RequestError(
            f"{path}.content is {content!r:.80}; it must be a string or a list of text parts",
            f"{path}.content",
        )
    if wants_parts:
        return [{"type": "text", "text": text} for text in texts if text]
    return "".join(texts)


def _part_text(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("text", "refusal"):
        raise RequestError(f"{path} has type {kind!r}; only text parts are supported", path)
    text = part.get(kind)
    if not isinstance(text, str):
        raise RequestError(f"{path}.{kind} is {text!r:.80}; it must be a string", f"{path}.{kind}")
    return text


def _tool_call(call: Any) -> Any:
    """Templates write arguments with `tojson`, so a JSON text of an object becomes that object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
