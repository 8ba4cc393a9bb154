"""Chat messages as clients send them: checked field by field, before a template sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..runtime.errors import RequestError
from .json_body import JsonObject, json_type
from .schema import found_value

ROLES = {  # as sent -> as templates know it
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
FIELDS = {"role", "content", "name", "tool_calls", "tool_call_id", "function_call", "refusal"}
REASONING_FIELDS = ("reasoning_content", "reasoning")
IGNORED_FIELDS = {"annotations"}  # what our and other servers' answers carry, sent back as history


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages fit for a template."""

    messages: list[JsonObject]
    has_tool_calls: bool
    num_bytes: int  # of all texts, as UTF-8


def read_messages(messages: Sequence[object]) -> Conversation:
    """Check messages and leave out what templates do not read.

    Raises `RequestError` whose param is a path such as `messages[0].content[1]`.
    """
    if not messages:
        raise RequestError("messages is empty; send at least one message", "messages")
    read = [_message(item, f"messages[{number}]") for number, item in enumerate(messages)]
    return Conversation(
        messages=read,
        has_tool_calls=any("tool_calls" in message for message in read),
        num_bytes=sum(_num_bytes(message["content"]) for message in read),
    )


def _message(item: object, path: str) -> JsonObject:
    if not isinstance(item, dict):
        raise RequestError(f"{path} is {json_type(item)}; it must be an object", path)
    sent = {key: value for key, value in item.items() if value is not None}
    role = _role(sent.get("role"), path)
    _check_fields(sent, path)
    message: JsonObject = {"role": role, "content": _content(sent, role, path)}
    for name in ("name", "tool_call_id", *REASONING_FIELDS):
        if name in sent:
            message[name] = _text(sent[name], f"{path}.{name}")
    calls = _tool_calls(sent, path) if role == "assistant" else []
    if calls:
        message["tool_calls"] = calls
    return message


def _role(role: object, path: str) -> str:
    if role is None:
        raise RequestError(f"{path}.role is missing; {_known_roles()}", f"{path}.role")
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(f"{path}.role is {found_value(role)}; {_known_roles()}", f"{path}.role")
    return ROLES[role]


def _known_roles() -> str:
    return f"known roles are {', '.join(ROLES)}"


def _check_fields(sent: JsonObject, path: str) -> None:
    for name in sent:
        if name == "audio":
            raise RequestError(f"{path}.audio is not supported: text only", f"{path}.audio")
        if name not in FIELDS and name not in REASONING_FIELDS and name not in IGNORED_FIELDS:
            raise RequestError(
                f"{path}.{name[:80]} is no field of a message; "
                f"known are {', '.join(sorted(FIELDS))}",
                f"{path}.{name[:80]}",
                "unknown_parameter",
            )


def _content(sent: JsonObject, role: str, path: str) -> str | list[JsonObject]:
    """A text, or text parts, which the template joins with nothing between them."""
    content = sent.get("content")
    if content is None:
        if role != "assistant":
            raise RequestError(f"{path}.content is missing; send a text", f"{path}.content")
        return _text(sent.get("refusal", ""), f"{path}.refusal")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            f"{path}.content is {json_type(content)}; it must be a string or a list of text parts",
            f"{path}.content",
        )
    texts = [_part(part, role, f"{path}.content[{n}]") for n, part in enumerate(content)]
    return [{"type": "text", "text": text} for text in texts]


def _part(part: object, role: str, path: str) -> str:
    if not isinstance(part, dict):
        raise RequestError(f"{path} is {json_type(part)}; it must be an object", path)
    kind = part.get("type")
    allowed = ("text", "refusal") if role == "assistant" else ("text",)
    if not isinstance(kind, str) or kind not in allowed:
        raise RequestError(
            f"{path} has type {found_value(kind)}; this model reads text only, "
            f"so the type must be {' or '.join(allowed)}",
            path,
        )
    if part.get(kind) is None:
        raise RequestError(f"{path}.{kind} is missing; send the text there", f"{path}.{kind}")
    return _text(part[kind], f"{path}.{kind}")


def _text(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{path} is {json_type(value)}; it must be a string", path)
    return value


def _tool_calls(sent: JsonObject, path: str) -> list[JsonObject]:
    calls = sent.get("tool_calls", [])
    if not isinstance(calls, list):
        raise RequestError(
            f"{path}.tool_calls is {json_type(calls)}; it must be a list", f"{path}.tool_calls"
        )
    read = [_tool_call(call, f"{path}.tool_calls[{n}]") for n, call in enumerate(calls)]
    if not read and "function_call" in sent:  # the spelling before tool_calls
        function = _function(sent["function_call"], f"{path}.function_call")
        read.append({"type": "function", "function": function})
    return read


def _tool_call(call: object, path: str) -> JsonObject:
    if not isinstance(call, dict):
        raise RequestError(f"{path} is {json_type(call)}; it must be an object", path)
    if call.get("type", "function") != "function":
        raise RequestError(
            f"{path}.type is {found_value(call['type'])}; it must be 'function'", f"{path}.type"
        )
    read: JsonObject = {"type": "function"}
    if call.get("id") is not None:
        read["id"] = _text(call["id"], f"{path}.id")
    read["function"] = _function(call.get("function"), f"{path}.function")
    return read


def _function(function: object, path: str) -> JsonObject:
    if not isinstance(function, dict):
        raise RequestError(f"{path} is {json_type(function)}; it must be an object", path)
    name = _text(function.get("name"), f"{path}.name")
    arguments = function.get("arguments")
    text = "" if arguments is None else _text(arguments, f"{path}.arguments")
    return {"name": name, "arguments": text}


def _num_bytes(content: object) -> int:
    if isinstance(content, str):
        return len(content.encode())
    assert isinstance(content, list), "a content is a string or a list of parts"
    return sum(len(part["text"].encode()) for part in content)
