"""Reading a request's JSON body within its limit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request

from .errors import ApiError

JsonObject = dict[str, object]
Result = TypeVar("Result")
LARGE_BYTES = 64 * 1024


async def read_json(request: Request, max_bytes: int) -> JsonObject:
    """The body as an object. Raises `ApiError` 413 (too large), 415 (not JSON), 400 (broken).

    Strict JSON: NaN, Infinity, numbers beyond a double and lone surrogates are refused.
    """
    content_type = request.headers.get("content-type", "application/json")
    media_type = content_type.split(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError(
            415,
            f"The body's content type is {media_type[:80]!r}; "
            "send JSON with the header 'Content-Type: application/json'.",
        )
    body = await read_body(request, max_bytes)
    value = await run_if_large(len(body), lambda: decode_json(body))
    if not isinstance(value, dict):
        raise ApiError(
            400, f"The body must be a JSON object, not {json_type(value)}.", code="invalid_json"
        )
    return value


async def run_if_large(num_bytes: int, work: Callable[[], Result]) -> Result:
    """Work whose time grows with a body: in a thread where it could hold the event loop up."""
    return await asyncio.to_thread(work) if num_bytes > LARGE_BYTES else work()


def decode_json(body: bytes) -> object:
    """Strict JSON. Raises `ApiError` 400."""
    try:
        return msgspec.json.decode(body)
    except msgspec.ValidationError:
        pass  # a number beyond its type: read as infinity, its field is refused by name later on
    except msgspec.DecodeError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "The body nests too deeply.", code="invalid_json") from None
    try:
        value = json.loads(body)
        msgspec.json.encode(value)  # finds lone surrogates, which `json` lets through
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}", code="invalid_json") from None
    return value


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body, or 413 as soon as it is known to be larger than `max_bytes`."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(f"{int(declared)} bytes", max_bytes)
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise _too_large(f"more than {max_bytes} bytes", max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(found: str, max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"The body has {found}; at most {max_bytes} bytes are accepted.",
        code="body_too_large",
        headers={"Connection": "close"},
    )


def json_type(value: object) -> str:
    """The JSON name of a parsed value's type, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    names = {
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)
