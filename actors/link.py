"""How a gateway talks to a worker: one small interface, and its plainest form, in process."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

from ..runtime.request import Request, RequestOutput
from .load import WorkerLoad

if TYPE_CHECKING:
    from .worker import Worker


class WorkerLink(Protocol):
    """What a gateway may ask of a worker.

    All but `load` raise `EngineError` when the worker cannot be reached or has died; `generate`
    also raises what the engine says to the request: `RequestError`, `QueueFullError`.
    """

    @property
    def kind(self) -> str:
        """What tokens travel on: `road`, `handle` or `local`; shown in /v1/paths."""
        ...

    async def describe(self) -> dict[str, Any]:  # JSON: model, plan, hardware, limits
        """What the worker is; does not change while it lives."""
        ...

    async def stats(self) -> dict[str, Any]:  # JSON: counters and gauges
        """What the worker does right now."""
        ...

    def load(self) -> WorkerLoad | None:
        """The latest load that is known here, without asking; None: nothing was heard yet."""
        ...

    def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """One item per engine step of this request; `aclose()` before the last one cancels it."""
        ...

    async def cancel(self, request_id: str) -> None:
        """Drop a request and free its pages; an unknown id is nothing."""
        ...

    async def hold(self, is_held: bool) -> None:
        """Have the worker tell every gateway to send it nothing new, or that they may again; `load`
        says so when this returns.
        """
        ...


class LocalLink:
    """A worker in this process: tests, and the plain twin of every other link."""

    kind = "local"

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def describe(self) -> dict[str, Any]:  # JSON
        return self._worker.describe()

    async def stats(self) -> dict[str, Any]:  # JSON
        return self._worker.stats()

    def load(self) -> WorkerLoad | None:
        return self._worker.load()

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        finished = False
        try:
            async with aclosing(self._worker.generate(request)) as outputs:
                async for output in outputs:
                    finished = output.finish_reason is not None
                    yield output
        finally:
            if not finished:
                self._worker.cancel(request.id)

    async def cancel(self, request_id: str) -> None:
        self._worker.cancel(request_id)

    async def hold(self, is_held: bool) -> None:
        self._worker.hold(is_held)
