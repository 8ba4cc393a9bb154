"""Links that break where a test says: after so many outputs of the first attempt, the second ..."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from polypath.actors.link import LocalLink
from polypath.actors.load import WorkerLoad
from polypath.actors.worker import Worker
from polypath.runtime.errors import EngineError
from polypath.runtime.request import FinishReason, Request, RequestOutput

DIES, MOVES, STALLS = "dies", "moves", "stalls"


class Script:
    """What becomes of the attempts of each answer: (outputs that still arrive, how it ends)."""

    def __init__(self, *attempts: tuple[int, str]) -> None:
        self._attempts = attempts
        self._begun: dict[str, int] = {}  # by the answer's id

    def next(self, request: Request) -> tuple[int, str] | None:
        """For the attempt that begins now; None: it ends by itself."""
        answer = request.id.partition(".")[0]
        number = self._begun[answer] = self._begun.get(answer, -1) + 1
        return self._attempts[number] if number < len(self._attempts) else None

    def num_attempts(self) -> list[int]:
        """Attempts of each answer so far."""
        return [number + 1 for number in self._begun.values()]


class BreakingLink:
    """A worker in this process whose streams break by a script that several links share."""

    kind = "local"

    def __init__(self, worker: Worker, script: Script, described: dict[str, Any] | None = None):
        self._inner = LocalLink(worker)
        self.script = script
        self._described = described or {}
        self.released = asyncio.Event()  # lets stalled streams go on
        self.is_silent = False

    async def describe(self) -> dict[str, Any]:
        return await self._inner.describe() | self._described

    async def stats(self) -> dict[str, Any]:
        if self.is_silent:
            await self.released.wait()
        return await self._inner.stats()

    def load(self) -> WorkerLoad | None:
        return self._inner.load()

    async def hold(self, is_held: bool) -> None:
        await self._inner.hold(is_held)

    async def cancel(self, request_id: str) -> None:
        await self._inner.cancel(request_id)

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        fate = self.script.next(request)
        num_left, how = fate if fate is not None else (-1, "")
        async with aclosing(self._inner.generate(request)) as outputs:
            async for output in outputs:
                if num_left == 0:
                    if how == MOVES:
                        yield _moved(request, output)
                        return
                    if how == DIES:
                        raise EngineError("the worker died")
                    self.is_silent = True
                    await self.released.wait()
                num_left -= 1
                yield output


def _moved(request: Request, output: RequestOutput) -> RequestOutput:
    return RequestOutput(
        request_id=request.id, position=output.position, finish_reason=FinishReason.MOVED
    )


def shared(workers: Sequence[Worker], script: Script) -> list[BreakingLink]:
    """A link to each worker, all breaking by one script."""
    return [BreakingLink(worker, script) for worker in workers]
