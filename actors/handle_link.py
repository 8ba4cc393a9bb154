"""A `WorkerLink` over a Serve handle: the road's twin, and what serves where no road can be had."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextvars import Context
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, cast

from ..runtime.errors import EngineError, PolypathError, QueueFullError, RequestError
from ..runtime.request import Request, RequestOutput
from .load import WorkerLoad

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator


class HandleLink:
    """One replica of a deployment; tokens come as a handle stream of their own for each request.

    `replica` is Serve's id of it: the deployment's router obeys the argument `to`
    (deployments/replica_router.py), and a replica that gets what was meant for another refuses it.
    """

    kind = "handle"

    def __init__(self, handle: DeploymentHandle, replica: str) -> None:
        self._handle = handle
        self._replica = replica
        self._load: WorkerLoad | None = None
        self._open: dict[str, str] = {}  # request id -> the worker's name for it
        self._numbers = count(1)
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
        if request.id in self._open:
            raise RequestError(f"a request with id {request.id!r} is running already", "id")
        # The name of one attempt: the cancel of an earlier one may arrive after this one began.
        name = self._open[request.id] = f"{request.id}~h{next(self._numbers)}"
        response = cast(
            "DeploymentResponseGenerator[RequestOutput]",
            self._call("generate", replace(request, id=name), stream=True),
        )
        finished = False
        try:
            async for output in response:
                finished = output.finish_reason is not None
                yield replace(output, request_id=request.id)
        except (PolypathError, *link_errors()) as error:
            ours = _as_ours(error)
            finished = not isinstance(ours, EngineError)  # then the worker never took the request
            raise ours from None
        finally:
            del self._open[request.id]
            if not finished:
                response.cancel()
                self._in_background(self._cancel_quietly(name))

    async def cancel(self, request_id: str) -> None:
        if request_id in self._open:
            await self._ask("cancel", self._open[request_id])

    async def hold(self, is_held: bool) -> None:
        await self._ask("hold", is_held)
        await self.stats()

    async def _ask(self, method: str, *args: object) -> Any:  # whatever the method answers
        try:
            return await self._call(method, *args)
        except (PolypathError, *link_errors()) as error:
            raise _as_ours(error) from None

    def _call(self, method: str, *args: object, stream: bool = False) -> Any:  # a Serve response
        """In an empty context: Serve joins calls made while it handles one request, and two of them
        under way at once would then take each other's replica.
        """
        handle = self._handle.options(method_name=method, stream=stream)
        return Context().run(handle.remote, *args, to=self._replica)

    async def _cancel_quietly(self, name: str) -> None:
        try:
            await self._ask("cancel", name)
        except EngineError:
            return  # a dead worker holds no pages

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:  # as create_task takes it
        task = asyncio.get_running_loop().create_task(work)
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)


def link_errors() -> tuple[type[Exception], ...]:
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
    if isinstance(error, link_errors()):
        kind = type(error).__name__
        return EngineError(f"the worker died or cannot be reached ({kind}); send the request again")
    return error
