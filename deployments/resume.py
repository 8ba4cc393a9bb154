"""One answer's engine request, carried from worker to worker until it ends.

A worker that fails, stalls or drains loses the request, and another one takes it up after the last
token that arrived: `Request.output_ids` says where. Text, stop strings and half characters live in
the answer, so nothing of it is lost or told twice. Each attempt has an id of its own, and what an
earlier one still sends is dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from ..runtime.errors import EngineError, PolypathError, QueueFullError, RequestError
from ..runtime.request import FinishReason, Request, RequestOutput, StepCount
from .answer_length import is_known
from .errors import ApiError
from .router import Ask
from .silence import noticed
from .visit import Visit

if TYPE_CHECKING:
    from .answer_length import AnswerLength
    from .api_settings import ApiSettings
    from .metrics import GatewayMetrics
    from .needs import Needs
    from .router import Decision, RoutingRules
    from .served_worker import Job, Worker
    from .waiting import Line

DOUBT = 0.5  # of lengths that are only expected: with it most answers keep goals near full load
MAX_STEP_FAILURES = 2  # a request whose step fails on so many workers is likely the reason itself
REFUSED_S = 0.2  # a worker that said its queue is full is asked again after this, then twice that
FAILED_S = 0.5  # a worker whose stream broke gets nothing for so long; by then its list is true

Take = Callable[[RequestOutput], bool]


class StepFailedError(EngineError):
    """The worker lives, and its forward pass for this request failed."""


class Attempts:
    """Runs one request until it ends; whoever awaits `run` ends it by cancelling."""

    def __init__(
        self,
        request: Request,
        needs: Needs,
        *,
        line: Line,
        rules: RoutingRules,
        lengths: AnswerLength,
        settings: ApiSettings,
        metrics: GatewayMetrics,
        model: str,
        arrived_s: float,
        goal_s: float | None = None,  # from arrival to the last token
        on_change: Callable[[], None],  # `is_running` did
    ) -> None:
        self.visits: list[Visit] = []
        self.is_running = False  # on a worker, not in the queue
        self.decision: Decision | None = None  # the first one
        self.waited_s = 0.0  # in the queue, before the first placement
        self._request = request
        self._needs = needs
        self._line = line
        self._rules = rules
        self._lengths = lengths
        self._settings = settings
        self._metrics = metrics
        self._model = model
        self._arrived_s = arrived_s
        self._goal_s = goal_s
        self._on_change = on_change
        self._output_ids: list[int] = list(request.output_ids)
        self._steps: dict[tuple[str, str, str], int] = {}
        self._cached_tokens: int | None = None  # of the attempt that gave the first token
        self._avoids: set[Worker] = set()
        self._num_refusals = 0
        self._num_failures = 0
        self._num_step_failures = 0
        self._last_error: Exception | None = None

    @property
    def worker(self) -> Worker | None:
        """The worker that has the answer, or had it last."""
        return self.visits[-1].worker if self.visits else None

    async def run(self, take: Take) -> tuple[StepCount, ...]:
        """Give every output to `take` until the last one, or until `take` says that it has enough.

        Returns the steps that are known to have run, on all workers together. Raises what the last
        worker said, when no other is left or all attempts are used up.
        """
        while True:
            job = await self._place()
            try:
                if await self._attempt(job, take):
                    return self.steps()
            except QueueFullError as error:
                self._note_refusal(job.worker, error)
            except RequestError as error:
                if not self._output_ids:
                    raise
                self._note_failure(job.worker, error)
            except EngineError as error:
                self._note_failure(job.worker, error)
            finally:
                job.end()
                self._line.changed()
                self.is_running = False
                self._on_change()

    def steps(self) -> tuple[StepCount, ...]:
        """Forward passes by mode, runner and reason, as far as workers could still tell."""
        return tuple(
            StepCount(mode=mode, runner=runner, reason=reason, steps=n)
            for (mode, runner, reason), n in sorted(self._steps.items())
        )

    async def _place(self) -> Job:
        before = self.worker if self._output_ids else None
        needs = self._needs
        if before is not None:
            is_exact = needs.is_deterministic
            needs = replace(
                needs, num_tokens=self._num_tokens(), continues=before if is_exact else None
            )
        expected = self._lengths.expected(self._request.sampling) - len(self._output_ids)
        ask = Ask(
            needs=needs,
            num_prompt=len(self._request.prompt_ids) + len(self._output_ids),
            num_answer=max(1, expected),
            rules=self._rules,
            avoids=self._avoids,
            came_from=before,
            due_s=self._due_s(),
            doubt=0.0 if is_known(self._request.sampling) else DOUBT,
        )
        try:
            job = await self._line.place(
                ask,
                priority=self._request.priority,
                arrived_s=self._arrived_s,
                last_error=self._last_error,
                on_placed=self._note_placed,
            )
        except (ApiError, PolypathError) as error:
            code = getattr(error, "code", None) or "failed"
            self._metrics.count_refused(self._model, code)
            raise
        self.visits.append(Visit(worker=job.worker, position=len(self._output_ids)))
        self.is_running = True
        self._on_change()
        return job

    def _due_s(self) -> float | None:
        """When its goal ends, of the loop's clock."""
        if self._goal_s is None:
            return None
        left_s = self._goal_s - (time.monotonic() - self._arrived_s)
        return asyncio.get_running_loop().time() + left_s

    def _num_tokens(self) -> int:
        """The context that a resumed answer needs: as long as it was to be, where it was said."""
        num_so_far = len(self._request.prompt_ids) + len(self._output_ids)
        return max(self._needs.num_tokens, num_so_far + 1)

    def _note_placed(self, decision: Decision, waited_s: float) -> None:
        self._metrics.count_route(self._model, decision.reason.value)
        if self.decision is None:
            self.decision, self.waited_s = decision, waited_s
            self._metrics.observe_queue(self._model, waited_s)

    async def _attempt(self, job: Job, take: Take) -> bool:
        """Run on one worker; False when the answer has to go on elsewhere."""
        request = self._next_request(job.worker)
        async with (
            noticed(job.worker, self._settings) as silence,
            aclosing(job.worker.link.generate(request)) as outputs,
        ):
            async for raw in outputs:
                silence.heard()
                output = self._accept(raw, job)
                if output is None:
                    continue
                if output.finish_reason is FinishReason.MOVED:
                    job.worker.is_leaving = True
                    self._leave(job.worker, "moved", "it was drained")
                    return False
                _raise_failure(output)
                is_enough = take(output)
                if output.finish_reason is not None:
                    return True
                if is_enough:
                    await self._wind_down(job.worker, request, outputs)
                    return True
        raise EngineError("the worker's stream ended before the answer did")

    def _next_request(self, worker: Worker) -> Request:
        """The request as this worker gets it: from where the answer stands, to the same length."""
        number = len(self.visits)
        name = self._request.id if number == 1 else f"{self._request.id}.{number}"
        sampling = self._request.sampling
        if self._output_ids and sampling.max_tokens is None:
            room = self.visits[0].worker.max_model_len - len(self._request.prompt_ids)
            sampling = replace(sampling, max_tokens=room)
        return replace(
            self._request, id=name, sampling=sampling, output_ids=tuple(self._output_ids)
        )

    def _accept(self, output: RequestOutput, job: Job) -> RequestOutput | None:
        """The output without what is known already; None when nothing of it is new."""
        num_known = len(self._output_ids) - output.position
        if num_known < 0:
            raise EngineError(f"{-num_known} tokens before number {output.position} never arrived")
        if num_known and output.token_ids:
            output = replace(
                output,
                position=output.position + min(num_known, len(output.token_ids)),
                token_ids=output.token_ids[num_known:],
                logprobs=output.logprobs[num_known:],
            )
        if not output.token_ids and output.finish_reason is None:
            return None
        self._output_ids += output.token_ids
        job.received(len(output.token_ids))
        if self._cached_tokens is None:
            self._cached_tokens = output.cached_tokens
        self._count(output.steps)
        if len(self.visits) > 1:
            output = replace(output, cached_tokens=self._cached_tokens, steps=self.steps())
        return output

    def _count(self, steps: tuple[StepCount, ...]) -> None:
        for step in steps:
            key = (step.mode, step.runner, step.reason)
            self._steps[key] = self._steps.get(key, 0) + step.steps

    async def _wind_down(
        self, worker: Worker, request: Request, outputs: AsyncGenerator[RequestOutput, None]
    ) -> None:
        """Cancel in the engine what a stop string ended, and wait a little for its step counts."""
        try:
            async with asyncio.timeout(self._settings.cancel_grace_s):
                await worker.link.cancel(request.id)
                async for output in outputs:
                    if output.finish_reason is not None:
                        self._count(output.steps)
                        return
        except (TimeoutError, EngineError):
            pass  # the answer is whole; only counts are missing, and closing the stream cancels

    def _note_failure(self, worker: Worker, error: PolypathError) -> None:
        """Never this worker again for this answer; raises when its attempts are used up."""
        self._num_failures += 1
        self._num_step_failures += isinstance(error, StepFailedError)
        self._last_error = error
        self._leave(worker, "failed", str(error))
        has_tried_enough = self._num_failures > self._settings.max_resumes
        if has_tried_enough or self._num_step_failures >= MAX_STEP_FAILURES:
            raise error
        if not isinstance(error, StepFailedError):
            worker.close_for(FAILED_S)

    def _note_refusal(self, worker: Worker, error: QueueFullError) -> None:
        """Somebody else filled it: ask again in a while, or another one; raises in the end."""
        self._num_refusals += 1
        self._metrics.count_lost(self._model, "refused")
        if self._num_refusals > self._settings.max_refusals:
            raise error
        worker.close_for(REFUSED_S * 2.0 ** (self._num_refusals - 1))
        self.visits.pop()

    def _leave(self, worker: Worker, kind: str, because: str) -> None:
        self._metrics.count_lost(self._model, kind)
        self._avoids.add(worker)
        self.visits[-1] = replace(self.visits[-1], left_because=because)


def _raise_failure(output: RequestOutput) -> None:
    """An answer that the engine gave up is an error, not a short answer."""
    if output.finish_reason is FinishReason.ERROR:
        raise StepFailedError(output.error or "a step of the engine failed")
    if output.finish_reason is FinishReason.CANCELLED:
        raise EngineError(output.error or "the worker gave the answer up; ask again")
