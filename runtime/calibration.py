"""A short measured run before a worker takes requests: how fast it prefills and decodes, and how
many requests at once are worth it. Between self-check and ready.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from .engine import Engine
from .request import FinishReason, Request, SamplingParams
from .speeds import Speeds
from .startup import StartupEvent

if TYPE_CHECKING:
    from .config import EngineConfig
    from .startup import OnProgress, Started

LIMIT_S = 3.0  # nothing begins that would likely end later
AIM_S = 0.8  # no larger batch begins after this
PREFILL_S = 0.25  # about what the measured prompt may take
MAX_PROMPT = 256  # tokens
SHORT_PROMPT = 4  # tokens of the requests that decode together
STEPS = 3  # timed at each batch size; the median counts
WORTH = 0.75  # of the best rate: a larger batch that has less is slower, and not by noise alone
LEAST = 4  # requests at once, though one alone were as fast: nobody waits for a whole other answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What was measured. `concurrency`: requests at once beyond which all is slower."""

    speeds: Speeds
    concurrency: int
    seconds: float

    def sentence(self) -> str:
        """For the plan's events and the start's progress."""
        rates = ", ".join(
            f"{self.speeds.decode_tokens_s(rows):.0f} at batch {rows}"
            for rows, _ in self.speeds.step_s
        )
        return (
            f"prefill {self.speeds.prefill_tokens_s:.0f} tokens/s, decode {rates}; "
            f"{self.concurrency} requests at once"
        )

    def to_json(self) -> dict[str, Any]:  # JSON
        """For the worker's description."""
        return {
            "speeds": self.speeds.to_json(),
            "concurrency": self.concurrency,
            "seconds": round(self.seconds, 4),
        }


def calibrate(started: Started, *, limit_s: float = LIMIT_S, aim_s: float = AIM_S) -> Calibration:
    """Measure an engine over these parts, which nothing else may use meanwhile; it leaves no pages
    behind. Takes at most about `limit_s`, or one prompt token and one step where that is longer.
    """
    run = _Run(started)
    try:
        return run.measure(limit_s, aim_s)
    finally:
        run.clear()


def build_calibrated(
    started: Started, config: EngineConfig, on_progress: OnProgress | None = None
) -> tuple[Started, Calibration | None]:
    """The parts with the plan's event, and what was measured; None when it was not to be."""
    if not config.calibration:
        plan = started.plan.with_event("calibration", "skipped, as asked")
        return replace(started, plan=plan), None
    found = calibrate(started)
    plan = started.plan.with_event("calibration", found.sentence())
    if on_progress is not None:
        on_progress(
            StartupEvent(
                stage="calibration",
                message=found.sentence(),
                fraction=1.0,
                seconds=found.seconds,
                data=found.to_json(),
            )
        )
    return replace(started, plan=plan), found


class _Run:
    """One run on an engine of its own, whose counters nobody reads."""

    def __init__(self, started: Started) -> None:
        self._engine = Engine(started)
        self._rng = random.Random(0)
        self._numbers = count()
        self._running: list[str] = []
        self._began_s = time.perf_counter()
        self._has_failed = False

    def measure(self, limit_s: float, aim_s: float) -> Calibration:
        first_s = self._first_step_s()
        prefill = self._prefill(first_s, limit_s)
        steps: dict[int, float] = {}
        rows = 1
        while rows <= self._largest() and not self._has_failed:
            likely_s = (STEPS + 2) * 2 * max(steps.values(), default=first_s / 2)
            if steps and (self._age_s() > aim_s or self._age_s() + likely_s > limit_s):
                break
            steps[rows] = self._decode(rows)
            rows *= 2
        speeds = Speeds(prefill_tokens_s=prefill, step_s=_rising(steps))
        concurrency = self._concurrency(speeds)
        return Calibration(speeds=speeds, concurrency=concurrency, seconds=self._age_s())

    def clear(self) -> None:
        """End what runs and forget its tokens."""
        self._drop()
        self._engine.pages.forget_all()

    def _age_s(self) -> float:
        return time.perf_counter() - self._began_s

    def _largest(self) -> int:
        """Requests that run at once and whose pages fit, however long calibration makes them."""
        pages, plan = self._engine.pages, self._engine.plan
        num_fitting = pages.num_usable // pages.pages_for(SHORT_PROMPT + 64)  # 64: its steps
        return max(1, min(plan.max_num_seqs, num_fitting))

    def _submit(self, num_prompt: int) -> None:
        name = f"calibration-{next(self._numbers)}"
        vocab = self._engine.model.config.vocab_size
        prompt = tuple(self._rng.randrange(vocab) for _ in range(num_prompt))
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        self._engine.submit(Request(id=name, prompt_ids=prompt, sampling=sampling))
        self._running.append(name)

    def _step(self) -> float:
        """One step's seconds."""
        start = time.perf_counter()
        outputs = self._engine.step()
        self._has_failed |= any(output.finish_reason is FinishReason.ERROR for output in outputs)
        return time.perf_counter() - start

    def _first_step_s(self) -> float:
        """A prompt of one token: warms up what is left cold, and bounds what a step takes."""
        self._submit(1)
        seconds = self._step()
        self._drop()
        return seconds

    def _prefill(self, first_s: float, limit_s: float) -> float:
        """Tokens a second of one prompt, sized by a smaller one; 0.0 where that is too slow."""
        room = min(MAX_PROMPT, self._engine.plan.max_model_len - 2)
        rate, length = 1.0 / first_s, min(16, room)
        while not self._has_failed and self._age_s() + length / rate < limit_s:
            self._submit(length)
            start = time.perf_counter()
            while self._engine.has_work() and not self._has_failed:
                self._step()
                if self._engine.num_queued_tokens() == 0:
                    break
            rate = length / (time.perf_counter() - start)
            self._drop()
            following = min(room, int(rate * PREFILL_S))
            if following <= 2 * length:
                return rate
            length = following
        return 0.0 if length <= 16 else rate

    def _drop(self) -> None:
        """End what runs, so that the next measurement is alone."""
        for name in self._running:
            self._engine.cancel(name)
        self._running.clear()
        self._engine.step()

    def _decode(self, rows: int) -> float:
        """Seconds of a decode step with so many rows; those of smaller batches go on."""
        while self._engine.num_running() + self._engine.num_waiting() < rows:
            self._submit(SHORT_PROMPT)
        while not self._has_failed and self._engine.num_queued_tokens():
            self._step()
        return statistics.median(self._step() for _ in range(STEPS))

    def _concurrency(self, speeds: Speeds) -> int:
        """The largest batch that is not plainly slower than the best; all that may run where none
        was. A start is a noisy moment, and too few at once costs more than too many.
        """
        limit = self._engine.plan.max_num_seqs
        rates = [(rows, rows / seconds) for rows, seconds in speeds.step_s]
        best = max((rate for _, rate in rates), default=0.0)
        largest = max((rows for rows, rate in rates if rate >= WORTH * best), default=limit)
        is_last = not rates or largest == rates[-1][0]
        return limit if is_last else min(limit, max(largest, LEAST))


def _rising(steps: dict[int, float]) -> tuple[tuple[int, float], ...]:
    """A larger batch never takes less time: what says so was noise."""
    found: list[tuple[int, float]] = []
    for rows, seconds in steps.items():
        found.append((rows, max(seconds, found[-1][1] if found else 0.0)))
    return tuple(found)
