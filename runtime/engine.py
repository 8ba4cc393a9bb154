"""The engine: requests in, tokens out, one step at a time. Knows nothing of Ray or HTTP."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .torch_import import torch  # isort: skip
from .collector import paused
from .counters import Counters
from .device_health import why_lost
from .emitter import Emitter
from .errors import EngineError, QueueFullError
from .forward_batch import ForwardBatch
from .inbox import Inbox
from .launched_step import LaunchedStep, StepSize
from .overlap import Overlap
from .penalties import counts_tokens
from .request import FinishReason, Request, RequestOutput
from .sampler import build_sampler
from .scheduler import ScheduledRow, Scheduler
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
        self._inbox = Inbox(
            capacity=self.plan.max_num_seqs + self.plan.max_waiting,
            vocab_size=self.model.config.vocab_size,
        )
        self._emitter = Emitter(
            self._scheduler,
            self.pages,
            self.counters,
            self._inbox,
            stop_ids=frozenset(self.model.config.eos_ids),
        )
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
        with paused():
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
            raise QueueFullError(
                f"{self._inbox.num_known} requests run or wait here, and the limit is "
                f"{self._inbox.capacity}; try again later",
                retry_after_s=max(1.0, self.queue_time_s()),
            )
        self._inbox.put(request)

    def has_room(self) -> bool:
        """Whether the finite queue takes another request."""
        return self._inbox.has_room

    def check(self, request: Request) -> None:
        """Raise RequestError or ContextLengthError when the request could never run here."""
        self._inbox.check(request)
        self._scheduler.check(request)

    def cancel(self, request_id: str) -> None:
        """End a request, wherever it is, before the next step; an unknown or ended one is left
        alone.
        """
        self._inbox.cancel(request_id)

    def knows(self, request_id: str) -> bool:
        """Whether a request of this id has been submitted and has not ended."""
        return self._inbox.knows(request_id)

    def has_work(self) -> bool:
        """Whether `step` would do something."""
        return self._inbox.has_items or bool(self._launched) or self._scheduler.has_work()

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
        while (item := self._inbox.take()) is not None:
            if isinstance(item, Request):
                self._scheduler.add(item)
            elif (state := self._scheduler.cancel(item)) is not None:
                ended.append(self._emitter.ended(state, FinishReason.CANCELLED))
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
            launched = LaunchedStep.sample(rows, logits, batch.num_logits, self._sampler, began)
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
                self._emitter.score_prompt(row, numbers)
        except RuntimeError as error:
            return self._fail(step.rows, error)
        runs = self._scheduler.runs
        emit = self._emitter.emit
        found = [emit(row, drawn) for row in step.rows if runs(row.state)]
        self.last_step = step.size(time.monotonic() - max(step.began, self.last_step_s))
        self.speeds.observe(
            self.last_step.num_tokens, self.last_step.is_decode, self.last_step.seconds
        )
        return [output for output in found if output is not None]

    def _fail(self, rows: list[ScheduledRow], error: RuntimeError) -> list[RequestOutput]:
        """A step failed twice: its requests end with an error, all others go on. EngineError when
        the device is lost: then the process must end, and its streams go on elsewhere.
        """
        if (lost := why_lost(self._device)) is not None:
            raise EngineError(f"the device answers no more ({lost}); start anew") from error
        logger.error("a step failed again after its retry; its %d requests end", len(rows))
        self.counters.step_failures += 1
        self.pages.forget_all()
        text = f"the worker's forward pass failed: {str(error).partition(chr(10))[0][:200]}"
        left = [row.state for row in rows if self._scheduler.runs(row.state)]
        for state in left:
            self._scheduler.finish(state)
        return [self._emitter.ended(state, FinishReason.ERROR, text) for state in left]

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
        return max(0, self._inbox.num_known - self._scheduler.num_running)

    def num_queued_tokens(self) -> int:
        """Tokens to be computed before every request here decodes; for the engine's own thread."""
        return self._inbox.num_tokens() + self._scheduler.num_queued_tokens()

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
