"""`X-Request-Timeout`: seconds after which a request is of no use to its client any more."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING

import msgspec
from starlette.datastructures import Headers

from .errors import ApiError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-timeout"
LONGEST_S = 7 * 24 * 3600.0


class Deadline:
    """Cancels what runs past the client's deadline, wherever it waits; leaving frees its pages.

    Before the first byte that is a 504, in a stream an SSE error event.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        timeout_s = None
        if scope["type"] == "http":
            timeout_s = asked_timeout_s(Headers(scope=scope).getlist(HEADER))
        if timeout_s is None:
            await self._app(scope, receive, send)
            return
        started, timer = False, asyncio.timeout(timeout_s)
        # What waits in a queue may look at this and not even begin; of the monotonic clock.
        deadline_s = time.monotonic() + timeout_s
        scope["state"] = {**scope.get("state", {}), "deadline_s": deadline_s}

        async def send_watched(message: Message) -> None:
            nonlocal started
            if timer.expired():
                return  # what comes now is of work that is being cancelled
            if message["type"] == "http.response.start":
                started = True
                kind = Headers(raw=message["headers"]).get("content-type", "")
                is_whole = not kind.startswith("text/event-stream")
            else:
                is_whole = not message.get("more_body", False)
            if is_whole:
                timer.reschedule(None)  # nothing is left but to send it
            await send(message)

        try:
            async with timer:
                await self._app(scope, receive, send_watched)
        except TimeoutError:
            if not timer.expired():
                raise  # another one, from within
            error = _late(timeout_s)
            if not started:
                raise error from None
            body = b"event: error\ndata: " + msgspec.json.encode(error.body()) + b"\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": False})


def asked_timeout_s(values: list[str]) -> float | None:
    """Seconds from the header; None without one. Raises `ApiError` 400."""
    if not values:
        return None
    try:
        seconds = float(values[0]) if len(values) == 1 else math.nan
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST_S:
        raise ApiError(
            400,
            f"the header X-Request-Timeout is {', '.join(values)[:60]!r}; it must be a number of "
            f"seconds above 0 and at most {LONGEST_S:.0f}",
            param="X-Request-Timeout",
            code="invalid_timeout",
        )
    return seconds


def _late(timeout_s: float) -> ApiError:
    return ApiError(
        504,
        f"The answer was not ready within the {timeout_s:g} s of X-Request-Timeout; it was "
        "cancelled.",
        code="deadline_exceeded",
    )
