"""The requests that a gateway is answering: when it stops, each is told so before its connection
ends.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from .errors import ApiError, retry_after

LOOK_S = 0.05
SENT_S = 1.0  # an error that a client has not taken by then is lost with the connection


class Open(Protocol):
    """As `Generation`."""

    @property
    def is_waiting(self) -> bool:
        """Whether no worker has begun it."""
        ...

    def fail(self, error: BaseException) -> None:
        """End it with this."""
        ...


class OpenRequests:
    """Belongs to the gateway's event loop."""

    def __init__(self) -> None:
        self._open: set[Open] = set()
        self._is_leaving = False

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, request: Open) -> None:
        """One more. Raises `ApiError` 503 when the gateway is leaving."""
        if self._is_leaving:
            raise leaving()
        self._open.add(request)

    def leave(self, request: Open) -> None:
        """It is over; a second time is nothing."""
        self._open.discard(request)

    def end_waiting(self) -> None:
        """Take nothing new, and end what no worker has begun: none will, from here."""
        self._is_leaving = True
        for request in self._open:
            if request.is_waiting:
                request.fail(leaving())

    async def end_all(self) -> None:
        """End what runs too, and give the errors a moment to be sent."""
        self.end_waiting()
        for request in self._open:
            request.fail(leaving())
        for _ in range(int(SENT_S / LOOK_S)):
            await asyncio.sleep(LOOK_S)
            if not self._open:
                break
        await asyncio.sleep(LOOK_S)


def leaving() -> ApiError:
    """The 503 of a server that stops."""
    return ApiError(
        503,
        "The server is stopping and cannot finish this answer; try again shortly.",
        code="shutting_down",
        headers=retry_after(5.0),
    )
