"""All engine requests of one API request: started together, merged as they come, ended together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ..runtime.errors import EngineError
from ..runtime.request import FinishReason, RequestOutput, StepCount
from .answer import Answer, Piece

if TYPE_CHECKING:
    from ..actors.link import WorkerLink
    from .gateway import Gateway, ServedModel, Worker


class Generation:
    """Runs `answers` on one worker; leaving the context cancels whatever still runs there.

    Use: `async with generation:`, then `await generation.begin()`, then iterate `batches()`. The
    first error of any answer ends all of them and is raised there.
    """

    worker: Worker  # picked when the generation is entered

    def __init__(
        self,
        gateway: Gateway,
        model: ServedModel,
        answers: Sequence[Answer],
        *,
        arrived_s: float,  # of the monotonic clock
    ) -> None:
        self.model = model
        self.answers = tuple(answers)
        self._gateway = gateway
        self._settings = gateway.settings
        self._metrics = gateway.metrics
        self._arrived_s = arrived_s
        self._inbox: asyncio.Queue[list[Piece] | BaseException] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        num_tokens = max(len(answer.prompt.ids) for answer in self.answers)
        num_tokens += self.answers[0].request.sampling.max_tokens or 0
        self.worker = self._gateway.pick_worker(self.model, num_tokens)
        self.worker.num_in_flight += len(self.answers)
        self._metrics.observe_queue(self.model.name, time.monotonic() - self._arrived_s)
        self._tasks = [asyncio.create_task(self._generate(answer)) for answer in self.answers]
        for task in self._tasks:
            task.add_done_callback(self._hand_over_error)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.worker.num_in_flight -= len(self.answers)
        self._metrics.observe_request(self.model.name, time.monotonic() - self._arrived_s)

    async def begin(self) -> None:
        """Wait for the first tokens, not for long: an error until here still has its own status."""
        try:
            async with asyncio.timeout(self._settings.headers_after_s):
                first = await self._inbox.get()
        except TimeoutError:
            return
        pieces, error = self._collect(first)
        if error is not None:
            raise error
        self._inbox.put_nowait(pieces)

    async def batches(self) -> AsyncIterator[list[Piece]]:
        """Pieces of all answers, everything that is ready at once; ends when every answer has."""
        num_left = len(self.answers)
        while num_left:
            pieces, error = self._collect(await self._inbox.get())
            num_left -= sum(piece.finish_reason is not None for piece in pieces)
            if pieces:
                yield pieces
            if error is not None:
                raise error

    def _collect(
        self, item: list[Piece] | BaseException
    ) -> tuple[list[Piece], BaseException | None]:
        """`item` and all that is ready behind it, up to the first error."""
        pieces: list[Piece] = []
        while not isinstance(item, BaseException):
            pieces += item
            if self._inbox.empty():
                return pieces, None
            item = self._inbox.get_nowait()
        return pieces, item

    def _hand_over_error(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._inbox.put_nowait(error)

    async def _generate(self, answer: Answer) -> None:
        link = self.worker.link
        last_s: float | None = None
        async with aclosing(link.generate(answer.request)) as outputs:
            async for output in outputs:
                _raise_failure(output)
                if output.token_ids:
                    last_s = self._observe(last_s)
                self._inbox.put_nowait(answer.take(output))
                if answer.is_stopped and answer.finish_reason is None:
                    answer.steps = output.steps or await self._wind_down(answer, link, outputs)
                    self._inbox.put_nowait([answer.close(FinishReason.STOP.value)])
                if answer.finish_reason is not None:
                    return
        raise EngineError("the worker's stream ended before the answer did")

    async def _wind_down(
        self, answer: Answer, link: WorkerLink, outputs: AsyncIterator[RequestOutput]
    ) -> tuple[StepCount, ...]:
        """Cancel in the engine what a stop string ended, and wait a little for its step counts."""
        try:
            async with asyncio.timeout(self._settings.cancel_grace_s):
                await link.cancel(answer.request.id)
                async for output in outputs:
                    if output.finish_reason is not None:
                        return output.steps
        except (TimeoutError, EngineError):
            pass  # the answer is whole; only its counts are missing, and closing the stream cancels
        return ()

    def _observe(self, last_s: float | None) -> float:
        now_s = time.monotonic()
        if last_s is None:
            self._metrics.observe_first_token(self.model.name, now_s - self._arrived_s)
        else:
            self._metrics.observe_inter_token(self.model.name, now_s - last_s)
        return now_s

    def steps(self) -> list[dict[str, object]]:
        """What really served: forward passes by mode, runner and reason, over all answers."""
        counts: dict[tuple[str, str, str], int] = {}
        for answer in self.answers:
            for step in answer.steps:
                key = (step.mode, step.runner, step.reason)
                counts[key] = counts.get(key, 0) + step.steps
        return [
            {"mode": mode, "runner": runner, "reason": reason, "steps": count}
            for (mode, runner, reason), count in sorted(counts.items())
        ]


def _raise_failure(output: RequestOutput) -> None:
    """An answer that the engine gave up is an error, not a short answer."""
    if output.finish_reason is FinishReason.ERROR:
        raise EngineError(output.error or "a step of the engine failed")
    if output.finish_reason is FinishReason.CANCELLED:
        raise EngineError(output.error or "the worker gave the answer up; ask again")
