"""Reading a request's JSON body within its limit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request

from .errors import ApiError, retry_after

JsonObject = dict[str, object]
Result = TypeVar("Result")
LARGE_BYTES = 64 * 1024
BODY_S = 60.0  # a body that takes longer to come is not waited for
READING_BYTES = 256 * 1024 * 1024  # of bodies that have not come whole, all clients together


class Reading:
    """Bytes of unfinished bodies in this process. A client that sends slowly holds what it sent."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Raises `ApiError` 429."""
        if self.num_bytes + num_bytes > READING_BYTES:
            raise ApiError(
                429,
                f"Bodies that other clients are sending fill {READING_BYTES} bytes; try again "
                "shortly.",
                code="bodies_full",
                headers={**retry_after(1.0), "Connection": "close"},
            )
        self.num_bytes += num_bytes


READING = Reading()


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
    """The whole body. Raises `ApiError` 413 as soon as it is known to be larger than `max_bytes`,
    408 when it takes longer than `BODY_S`, 429 when all clients together are sending too much.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(f"{int(declared)} bytes", max_bytes)
    chunks: list[bytes] = []
    num_bytes = 0
    limit = asyncio.timeout(BODY_S)
    try:
        async with limit:
            async for chunk in request.stream():
                if num_bytes + len(chunk) > max_bytes:
                    raise _too_large(f"more than {max_bytes} bytes", max_bytes)
                READING.add(len(chunk))
                num_bytes += len(chunk)
                chunks.append(chunk)
    except TimeoutError:
        if not limit.expired():
            raise
        raise _too_slow(num_bytes) from None
    finally:
        READING.num_bytes -= num_bytes
    return b"".join(chunks)


def _too_slow(num_bytes: int) -> ApiError:
    return ApiError(
        408,
        f"Of the body {num_bytes} bytes came within {BODY_S:g} s; send it faster.",
        code="body_too_slow",
        headers={"Connection": "close"},
    )


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
