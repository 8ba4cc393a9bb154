"""How busy a worker is and how fast it has been: what it tells gateways with each step's tokens."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..runtime.engine import Engine

HALF_LIFE_S = 10.0  # of busy time: what a rate remembers


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLoad:
    """One look at a worker. Rates are aggregates over all its requests, 0.0 while unknown."""

    running: int  # requests that hold pages
    waiting: int  # requests in its queue
    queued_tokens: int  # prompt tokens (of resumed requests: all) not yet computed, of everything
    kv_pages_free: int
    prefill_tokens_s: float  # tokens a second of steps that compute prompts
    decode_tokens_s: float  # tokens a second of steps that only decode
    step_s: float  # seconds of a step, lately
    sent_s: float  # the worker's wall clock when it looked
    is_held: bool = False  # an operator wants that no gateway sends it anything new


class Rate:
    """Tokens a second of busy time, with recent steps counting most; 0.0 until the first step."""

    __slots__ = ("_seconds", "_tokens")

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        fade = math.exp2(-seconds / HALF_LIFE_S)
        self._tokens = self._tokens * fade + tokens
        self._seconds = self._seconds * fade + seconds

    @property
    def tokens_s(self) -> float:
        """Tokens a second, lately."""
        return self._tokens / self._seconds if self._seconds else 0.0


class LoadMeter:
    """Measures one engine, step by step, on the engine's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._prefill = Rate()
        self._decode = Rate()
        self._step_s = 0.0
        self.is_held = False

    def after_step(self) -> WorkerLoad:
        """Count the step that just ended, and look."""
        step = self._engine.last_step
        if step.num_tokens:
            rate = self._decode if step.is_decode else self._prefill
            rate.add(step.num_tokens, step.seconds)
            weight = 0.2 if self._step_s else 1.0
            self._step_s += weight * (step.seconds - self._step_s)
        return self.look()

    def look(self) -> WorkerLoad:
        """The load right now."""
        engine = self._engine
        return WorkerLoad(
            running=engine.num_running(),
            waiting=engine.num_waiting(),
            queued_tokens=engine.num_queued_tokens(),
            kv_pages_free=engine.pages.num_free,
            prefill_tokens_s=self._prefill.tokens_s,
            decode_tokens_s=self._decode.tokens_s,
            step_s=self._step_s,
            sent_s=time.time(),
            is_held=self.is_held,
        )
