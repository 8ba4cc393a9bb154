"""Where the outputs of one request go once a step has made them; the worker's side of any link."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Protocol

from ..runtime.errors import EngineError
from ..runtime.request import Request, RequestOutput


class Outlet(Protocol):
    """Takes what one request gets, on the worker's event loop; must not block or raise."""

    def put(self, output: RequestOutput) -> None:
        """What a step gave; nothing comes after an output with a `finish_reason`."""
        ...

    def fail(self, error: EngineError) -> None:
        """The engine has died or stopped; nothing comes after this."""
        ...


class StreamOutlet:
    """Makes an async iterator of one request's outputs."""

    def __init__(self, request: Request) -> None:
        self.request_id = request.id
        self._items: asyncio.Queue[RequestOutput | EngineError] = asyncio.Queue()

    def put(self, output: RequestOutput) -> None:
        self._items.put_nowait(output)

    def fail(self, error: EngineError) -> None:
        self._items.put_nowait(error)

    async def outputs(self) -> AsyncIterator[RequestOutput]:
        """Until the last output. Raises EngineError when the engine dies."""
        while True:
            item = await self._items.get()
            if isinstance(item, EngineError):
                raise item
            if item.request_id != self.request_id:  # the engine knows it by another name
                item = replace(item, request_id=self.request_id)
            yield item
            if item.finish_reason is not None:
                return
