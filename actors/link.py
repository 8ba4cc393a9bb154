"""How a gateway talks to a worker: one small interface, in process or over a Serve handle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol, cast

from ..runtime.errors import EngineError, PolypathError, QueueFullError
from ..runtime.request import Request, RequestOutput
from .load import WorkerLoad

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

    from .worker import Worker


class WorkerLink(Protocol):
    """What a gateway may ask of a worker.

    All four raise `EngineError` when the worker cannot be reached or has died; `generate` also
    raises what the engine says to the request: `RequestError`, `QueueFullError`.
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


class HandleLink:
    """A worker behind a Serve handle: tokens come as a handle stream.

    Everything but the stream is a broadcast, so that a cancel reaches the worker that has the
    request, whichever that is. All calls count against Serve's limit of ongoing requests, which
    therefore lies above what the engine holds.
    """

    kind = "handle"

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._stream = handle.options(stream=True, method_name="generate")
        self._load: WorkerLoad | None = None
        self._cancels: set[asyncio.Task[None]] = set()  # the loop holds tasks weakly

    async def describe(self) -> dict[str, Any]:  # JSON
        return await self._ask("describe")

    async def stats(self) -> dict[str, Any]:  # JSON
        stats = await self._ask("stats")
        if stats.get("load") is not None:
            self._load = WorkerLoad(**stats["load"])
        return stats

    def load(self) -> WorkerLoad | None:
        return self._load  # as old as the last `stats`

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        response = cast("DeploymentResponseGenerator[RequestOutput]", self._stream.remote(request))
        finished = False
        try:
            async for output in response:
                finished = output.finish_reason is not None
                yield output
        except (PolypathError, *_link_errors()) as error:
            ours = _as_ours(error)
            finished = not isinstance(ours, EngineError)  # then the worker never took the request
            raise ours from None
        finally:
            if not finished:
                response.cancel()
                self._in_background(self._cancel_quietly(request.id))

    async def cancel(self, request_id: str) -> None:
        await self._ask("cancel", request_id)

    async def _ask(self, method: str, *args: object) -> Any:  # whatever the method answers
        try:
            answers = await self._handle.broadcast(method, *args).results_async()
        except _link_errors() as error:
            raise _as_ours(error) from None
        return answers[0]

    async def _cancel_quietly(self, request_id: str) -> None:
        try:
            await self.cancel(request_id)
        except EngineError:
            return  # a dead worker holds no pages

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:  # as create_task takes it
        task = asyncio.get_running_loop().create_task(work)
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)


def _link_errors() -> tuple[type[Exception], ...]:
    """Everything Ray, Serve and gRPC raise for a call that failed, or failed to arrive."""
    import grpc
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    return RayError, RayServeException, grpc.RpcError


def _as_ours(error: Exception) -> Exception:
    """Undo Ray's wrapping: the worker's errors as it raised them, a failed call as EngineError."""
    from ray.exceptions import RayTaskError
    from ray.serve.exceptions import BackPressureError

    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        return _as_ours(error.cause)
    if isinstance(error, BackPressureError):
        return QueueFullError("all places of the worker are taken; try again shortly")
    if isinstance(error, _link_errors()):
        kind = type(error).__name__
        return EngineError(f"the worker died or cannot be reached ({kind}); send the request again")
    return error
