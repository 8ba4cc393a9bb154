"""The engine: requests in, tokens out, one step at a time. Knows nothing of Ray or HTTP."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..kernels.transfer import to_device
from .counters import Counters
from .errors import QueueFullError, RequestError
from .forward_batch import ForwardBatch
from .launched_step import Drawn, LaunchedStep, StepSize
from .logits import Logits
from .logprobs import RowLogprobs, prompt_logprobs
from .overlap import Overlap
from .penalties import counts_tokens
from .request import FinishReason, Request, RequestOutput, StepCount, TokenLogprob
from .sampler import NoToken, build_sampler
from .scheduler import RequestState, ScheduledRow, Scheduler
from .speeds import SpeedMeter

if TYPE_CHECKING:
    from .calibration import Calibration
    from .config import EngineConfig
    from .offline import Completion, Prompt
    from .request import SamplingParams
    from .startup import OnProgress, Started
    from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Engine:
    """Continuous batching over one model on one node.

    `submit` and `cancel` may be called from any thread; `step` and everything else belong to the
    one thread that drives it.
    """

    def __init__(self, started: Started, calibration: Calibration | None = None) -> None:
        self.calibration = calibration  # None: not measured
        self.speeds = SpeedMeter(calibration.speeds if calibration is not None else None)
        self.hardware = started.hardware
        self.plan = started.plan
        self.checkpoint = started.checkpoint
        self.model = started.model
        self.kv = started.kv
        self.pages = started.pages
        self.counters = Counters()
        self._runner = started.runner
        self._device = torch.device(self.plan.device)
        self._stop_ids = frozenset(self.model.config.eos_ids)
        self._sampler = build_sampler(
            self.model.config.vocab_size,
            self._device,
            self.model.config.eos_ids,
            overlaps=self.plan.overlap_depth > 0,
        )
        self._scheduler = Scheduler(
            self.pages,
            max_model_len=self.plan.max_model_len,
            max_num_seqs=self.plan.max_num_seqs,
            max_num_batched_tokens=self.plan.max_num_batched_tokens,
        )
        self._launched: deque[LaunchedStep] = deque()  # given to the device, not yet emitted
        self._inbox: deque[Request | str] = deque()  # requests, and ids to cancel, in order
        self._known: set[str] = set()  # ids submitted and not yet ended
        self._tokenizer: Tokenizer | None = None  # loaded at first use: a worker never needs it
        self.last_step_s = time.monotonic()
        self.last_step = StepSize(num_tokens=0, is_decode=False, seconds=0.0)

    @classmethod
    def build(
        cls,
        config: EngineConfig,
        *,
        on_progress: OnProgress | None = None,
        cores_given: float | None = None,
        calibrates: bool = False,
    ) -> Engine:
        """Probe, plan, load and self-check (DESIGN: start-up in order). Raises ConfigurationError
        before weights load. A worker calibrates too: what routes its requests needs its speed.
        """
        from .calibration import build_calibrated
        from .startup import start

        started = start(config, on_progress=on_progress, cores_given=cores_given)
        if not calibrates:
            return cls(started)
        return cls(*build_calibrated(started, config, on_progress))

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        if self._tokenizer is None:
            self._tokenizer = self.checkpoint.tokenizer()
        return self._tokenizer

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError, ContextLengthError or QueueFullError; then nothing
        was queued.
        """
        self.check(request)
        if not self.has_room():
            limit = self.plan.max_num_seqs + self.plan.max_waiting
            raise QueueFullError(
                f"{len(self._known)} requests run or wait here, and the limit is {limit}; try "
                "again later",
                retry_after_s=max(1.0, self.queue_time_s()),
            )
        self._known.add(request.id)
        self._inbox.append(request)

    def has_room(self) -> bool:
        """Whether the finite queue takes another request."""
        return len(self._known) < self.plan.max_num_seqs + self.plan.max_waiting

    def check(self, request: Request) -> None:
        """Raise RequestError or ContextLengthError when the request could never run here."""
        if request.id in self._known:
            raise RequestError(f"a request with id {request.id!r} is running already", "id")
        if not request.prompt_ids:
            raise RequestError("the prompt has no token; send at least one", "prompt")
        vocab = self.model.config.vocab_size
        for name, ids in (("prompt", request.prompt_ids), ("output_ids", request.output_ids)):
            if min(ids, default=0) < 0 or max(ids, default=0) >= vocab:
                wrong = next(i for i in ids if not 0 <= i < vocab)
                raise RequestError(
                    f"{name} holds token id {wrong}; this model's ids are 0 to {vocab - 1}", name
                )
        biased = [i for i in request.sampling.logit_bias if not 0 <= i < vocab]
        if biased:
            raise RequestError(
                f"logit_bias names token id {biased[0]}; this model's ids are 0 to {vocab - 1}",
                "logit_bias",
            )
        self._scheduler.check(request)

    def cancel(self, request_id: str) -> None:
        """End a request, wherever it is, before the next step; an unknown or ended one is left
        alone.
        """
        if request_id in self._known:
            self._inbox.append(request_id)

    def knows(self, request_id: str) -> bool:
        """Whether a request of this id has been submitted and has not ended."""
        return request_id in self._known

    def has_work(self) -> bool:
        """Whether `step` would do something."""
        return bool(self._inbox or self._launched) or self._scheduler.has_work()

    def step(self) -> list[RequestOutput]:
        """Run one step: admit, schedule, build the batch, forward, sample, emit.

        Where steps overlap, what is emitted is of the step before, which ran meanwhile.
        """
        start = time.monotonic()
        outputs = self._take_inbox()
        rows, early = self._settle(self._scheduler.schedule())
        outputs += early
        outputs += self._launch(rows, start) if rows else []
        outputs += self._emit_steps(but=self.plan.overlap_depth if rows else 0)
        self.last_step_s = time.monotonic()
        self.counters.step_seconds += self.last_step_s - start
        return outputs

    def _take_inbox(self) -> list[RequestOutput]:
        ended: list[RequestOutput] = []
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Request):
                self._scheduler.add(item)
            elif (state := self._scheduler.cancel(item)) is not None:
                ended.append(self._ended(state, FinishReason.CANCELLED))
        return ended

    def _settle(self, rows: list[ScheduledRow]) -> tuple[list[ScheduledRow], list[RequestOutput]]:
        """Wait for the step that runs where these rows need its tokens on the host; rows that it
        ended are dropped.
        """
        if self.plan.overlap_depth == 0 or not rows:
            return rows, []
        how = Overlap.OVERLAPPED if self._launched else Overlap.IDLE
        needy = any(row.state.num_pending and counts_tokens(row.state) for row in rows)
        self.counters.overlap[Overlap.PENALTIES if needy else how] += 1
        if not needy:
            return rows, []
        outputs = self._emit_steps()
        return [row for row in rows if self._scheduler.runs(row.state)], outputs

    def _launch(self, rows: list[ScheduledRow], began: float) -> list[RequestOutput]:
        """Give a step to the device. Only one that fails at once has outputs."""
        batch = ForwardBatch.build(rows, page_size=self.pages.page_size, device=self._device)
        start = time.monotonic()
        try:
            if self._launched and (before := self._launched[-1].sampled) is not None:
                batch = batch.with_drawn(before.device_ids)
            logits, runner, reason = self._runner.forward(batch)
            self.counters.forward_seconds += time.monotonic() - start
            launched = self._sample(rows, logits, batch.num_logits, began)
        except RuntimeError as error:
            return self._emit_steps() + self._fail(rows, error)
        # `value` of an enum is a call of Python's, and here caches are empty
        key = (batch.mode._value_, runner, reason._value_)
        self.counters.steps[key] += 1
        for row in rows:
            row.state.steps[key] += 1
            self._scheduler.advance(row)
            if row.draw >= 0:
                row.state.expect(row.draw)
        self._launched.append(launched)
        return []

    def _emit_steps(self, but: int = 0) -> list[RequestOutput]:
        """Wait for the steps that run, oldest first, all `but` so many."""
        outputs: list[RequestOutput] = []
        while len(self._launched) > but:
            outputs += self._emit_step(self._launched.popleft())
        return outputs

    def _emit_step(self, step: LaunchedStep) -> list[RequestOutput]:
        """The outputs of one step; rows that were ended or preempted while it ran are dropped."""
        try:
            drawn = step.drawn()
            for row, numbers in step.scores:
                self._score_prompt(row, numbers)
        except RuntimeError as error:
            return self._fail(step.rows, error)
        runs = self._scheduler.runs
        found = [self._emit(row, drawn) for row in step.rows if runs(row.state)]
        self.last_step = step.size(time.monotonic() - max(step.began, self.last_step_s))
        self.speeds.observe(
            self.last_step.num_tokens, self.last_step.is_decode, self.last_step.seconds
        )
        return [output for output in found if output is not None]

    def _fail(self, rows: list[ScheduledRow], error: RuntimeError) -> list[RequestOutput]:
        """A step failed twice: its requests end with an error, all others go on."""
        logger.error("a step failed again after its retry; its %d requests end", len(rows))
        self.counters.step_failures += 1
        self.pages.forget_all()
        text = f"the worker's forward pass failed: {str(error).partition(chr(10))[0][:200]}"
        left = [row.state for row in rows if self._scheduler.runs(row.state)]
        for state in left:
            self._scheduler.finish(state)
        return [self._ended(state, FinishReason.ERROR, text) for state in left]

    def _sample(
        self, rows: list[ScheduledRow], logits: Logits, num_logits: int, began: float
    ) -> LaunchedStep:
        """Draw a token for each row that samples; compute prompt log-probabilities."""
        scores: list[tuple[ScheduledRow, RowLogprobs]] = []
        sampling: list[RequestState] = []
        wanted: list[int] = []
        offset = 0
        for row in rows:
            if scored := row.num_prompt_logits:
                scores.append((row, _prompt_scores(row, logits.values[offset : offset + scored])))
                offset += scored
            if row.samples:
                row.draw = len(sampling)
                sampling.append(row.state)
                wanted.append(offset)
                offset += 1
        if not sampling:
            return LaunchedStep(rows, began, None, scores)
        if len(wanted) < num_logits:
            logits = logits.rows(to_device(torch.tensor(wanted), logits.values.device))
        sampled = self._sampler.sample(logits, sampling)
        return LaunchedStep(rows, began, sampled, scores)

    def _score_prompt(self, row: ScheduledRow, numbers: RowLogprobs) -> None:
        """Collect prompt log-probabilities, unless they will be computed again."""
        if self._scheduler.runs(row.state):
            if not row.state.prompt_logprobs:
                row.state.prompt_logprobs.append(None)
            row.state.prompt_logprobs.extend(numbers.to_host())

    def _emit(self, row: ScheduledRow, drawn: list[Drawn]) -> RequestOutput | None:
        """What its row gave one request; None while its prompt is not yet complete."""
        state = row.state
        self._scheduler.remember(row)
        if row.draw < 0:
            if row.start + row.num_tokens < state.num_known:
                return None
            self._scheduler.finish(state)  # its answer was complete before
            return self._ended(state, FinishReason.LENGTH)
        token = drawn[row.draw]
        if isinstance(token, NoToken):
            self._scheduler.finish(state)
            if token is NoToken.NOT_FINITE:  # keys and values of others may be damaged too
                self.pages.forget_all()
            return self._ended(state, FinishReason.ERROR, f"no token can be drawn: {token.value}")
        state.resolve(token[0])
        self.counters.generation_tokens += 1
        reason = self._finish_reason(state, token[0])
        if reason is None:
            return self._output(state, token)
        self._scheduler.finish(state)
        return self._ended(state, reason, token=token)

    def _finish_reason(self, state: RequestState, token: int) -> FinishReason | None:
        params = state.sampling
        is_end = (
            token in self._stop_ids and not params.ignore_eos
        ) or token in params.stop_token_ids
        num_outputs = state.num_known_outputs
        if is_end and num_outputs > params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_outputs >= state.max_outputs else None

    def _output(
        self,
        state: RequestState,
        token: tuple[int, TokenLogprob | None] | None = None,
        reason: FinishReason | None = None,
        error: str | None = None,
    ) -> RequestOutput:
        prompt_logprobs = None
        if not state.has_prompt_logprobs and reason not in (
            FinishReason.CANCELLED,
            FinishReason.ERROR,
        ):
            state.has_prompt_logprobs = True
            prompt_logprobs = tuple(state.prompt_logprobs or [None])
            state.prompt_logprobs = []
        ids = () if token is None else (token[0],)
        steps = () if reason is None else _step_counts(state)
        return RequestOutput(
            request_id=state.request.id,
            position=state.num_known_outputs - len(ids),
            token_ids=ids,
            logprobs=() if token is None or token[1] is None else (token[1],),
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            cached_tokens=state.cached_tokens,
            steps=steps,
            error=error,
        )

    def _ended(
        self,
        state: RequestState,
        reason: FinishReason,
        error: str | None = None,
        token: tuple[int, TokenLogprob | None] | None = None,
    ) -> RequestOutput:
        """The last output of a request that the scheduler has let go."""
        self._known.discard(state.request.id)
        self.counters.requests[reason.value] += 1
        self.counters.prompt_tokens += state.num_prompt
        return self._output(state, token, reason, error)

    def queue_time_s(self) -> float:
        """How long a new request is likely to wait, in seconds: what admitted ones waited, or the
        oldest still waits.
        """
        if not self._scheduler.num_waiting:
            return 0.0
        return max(self._scheduler.queue_time_s, self._scheduler.oldest_wait_s())

    def num_running(self) -> int:
        """Requests that hold pages."""
        return self._scheduler.num_running

    def num_waiting(self) -> int:
        """Requests submitted that hold no pages yet, preempted ones included."""
        return max(0, len(self._known) - self._scheduler.num_running)

    def num_queued_tokens(self) -> int:
        """Tokens to be computed before every request here decodes; for the engine's own thread."""
        inbox = [item for item in tuple(self._inbox) if isinstance(item, Request)]
        new = sum(len(request.prompt_ids) + len(request.output_ids) for request in inbox)
        return new + self._scheduler.num_queued_tokens()

    def stats(self) -> dict[str, object]:
        """Live load and counters; may be read from another thread."""
        return {
            "running": self.num_running(),
            "waiting": self.num_waiting(),
            "kv_pages_total": self.pages.num_usable,
            "kv_pages_used": self.pages.num_used,
            "preemptions_total": self._scheduler.num_preemptions,
            "prefix_cached_tokens_total": self._scheduler.num_cached_tokens,
            "queue_time_s": self.queue_time_s(),
            "speeds": self.speeds.speeds().to_json(),
            **self.counters.to_json(),
        }

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: Sequence[str] = (),
    ) -> list[Completion]:
        """Answer a batch of prompts (texts or token ids) in their order. See offline.py."""
        from .offline import generate

        return generate(self, prompts, params, stop=stop)


def _step_counts(state: RequestState) -> tuple[StepCount, ...]:
    return tuple(
        StepCount(mode=mode, runner=runner, reason=reason, steps=n)
        for (mode, runner, reason), n in sorted(state.steps.items())
    )


def _prompt_scores(row: ScheduledRow, logits: torch.Tensor) -> RowLogprobs:
    """Log-probabilities of the prompt tokens after those of `logits`."""
    state, k = row.state, row.state.sampling.prompt_logprobs
    assert k is not None, "only a request that asks has prompt logits"
    first = state.num_computed + 1
    return prompt_logprobs(logits, state.token_ids[first : first + len(logits)], k)
