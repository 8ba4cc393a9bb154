"""Policies in the simulator: ours, and Ray Serve's default one by its own formula."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from .answer_length import AnswerLength
from .arrivals import Arrivals
from .autoscaling import Memory, scale
from .autoscaling_pools import Demand, Lack, PoolState, ScalingRules, Tokens, lack
from .autoscaling_simulator import Look


class OurScaler:
    """`autoscaling.scale` on what a gateway would know: prompts, and a guess of each answer."""

    def __init__(self, rules: ScalingRules) -> None:
        self._rules = rules
        self._memory: Memory = {}
        self._arrivals: dict[frozenset[str] | None, Arrivals] = {None: Arrivals()}
        self._lengths = AnswerLength()
        self._lacks: dict[str, Lack | None] = {}

    def targets(self, look: Look) -> dict[str, int]:
        for done in look.finished:
            self._lengths.observe(done.num_new)
        guess = self._lengths.mean
        for arrival in look.arrived:
            arrivals = self._arrivals.setdefault(arrival.able, Arrivals())
            arrivals.add(arrival.num_prompt, guess, arrival.time_s)
        states = {name: self._state(name, look) for name in look.pools}
        bound = self._bound(look, guess)
        num_running = sum(look.running.values()) - sum(look.num_bound.values())
        demand = self._demand(None, look, guess, num_running)
        found = scale(self._rules, states, demand, self._memory, look.now_s, bound)
        self._memory = found.memory
        return found.targets

    def _bound(self, look: Look, guess: float) -> dict[frozenset[str], Demand]:
        """As a gateway tells it: what runs needs the pool where it is."""
        running = {frozenset({name}): count for name, count in look.num_bound.items()}
        sets = {able for able in [*running, *self._arrivals] if able is not None}
        return {able: self._demand(able, look, guess, running.get(able, 0)) for able in sets}

    def _demand(
        self, able: frozenset[str] | None, look: Look, guess: float, num_running: int
    ) -> Demand:
        waiting = [each for each in look.waiting if each.able == able]
        arrivals = self._arrivals.get(able)
        return Demand(
            arriving=Tokens() if arrivals is None else arrivals.rate(look.now_s),
            waiting=Tokens(
                prompt=sum(arrival.num_prompt for arrival in waiting), new=guess * len(waiting)
            ),
            num_unfinished=len(waiting) + num_running,
        )

    def _state(self, name: str, look: Look) -> PoolState:
        pool, ready, target = look.pools[name], look.ready[name], look.target[name]
        found = self._lacks[name] = lack(self._lacks.get(name), ready, target, look.now_s)
        return PoolState(
            rules=pool.rules,
            ready=ready,
            target=target,
            prefill_tokens_s=pool.speeds.prefill_tokens_s,
            decode_tokens_s=pool.speeds.decode_tokens_s(pool.concurrency),
            lacking_s=0.0 if found is None else look.now_s - found[0],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeDefaults:
    """What `ray.serve.config.AutoscalingConfig` may set; the values are its own defaults (2.60).

    `per_place` counts `target_ongoing_requests` in shares of a worker's concurrency instead.
    """

    target_ongoing_requests: float = 2.0
    per_place: float | None = None
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    look_back_period_s: float = 30.0
    metrics_interval_s: float = 10.0

    def target(self, concurrency: int) -> float:
        """Requests that one worker should have."""
        if self.per_place is None:
            return self.target_ongoing_requests
        return max(0.5, self.per_place * concurrency)

    def __str__(self) -> str:
        aim = (
            f"{self.target_ongoing_requests:g}"
            if self.per_place is None
            else f"{self.per_place:g} x concurrency"
        )
        return (
            f"target_ongoing_requests {aim}, upscale_delay_s {self.upscale_delay_s:g}, "
            f"downscale_delay_s {self.downscale_delay_s:g}"
        )


@dataclass(slots=True)
class _Delay:
    """Since when more (or fewer) are wanted, as `_apply_delay_logic` counts it."""

    sign: int = 0
    since_s: float = 0.0


@dataclass(slots=True)
class _PoolMemory:
    samples: deque[tuple[float, float]] = field(default_factory=deque)  # time, ongoing requests
    sent: list[tuple[float, float]] = field(default_factory=list)  # as the controller has them
    sent_s: float = -math.inf
    delay: _Delay = field(default_factory=_Delay)


class ServeScaler:
    """Ray Serve's `replica_queue_length_autoscaling_policy`, for each pool by itself, by the
    formula of ray/serve/autoscaling_policy.py (2.60): the mean of ongoing requests over the look
    back, over the target, rounded up; then the delays. None of it sees other pools, so what waits
    is given to pools in the order of `order`, each up to what it may hold: more than Serve does.
    """

    def __init__(self, settings: ServeDefaults, order: Sequence[str]) -> None:
        self._settings = settings
        self._order = order
        self._pools = {name: _PoolMemory() for name in order}

    def targets(self, look: Look) -> dict[str, int]:
        return {
            name: self._decide(look, name, ongoing) for name, ongoing in self._ongoing(look).items()
        }

    def _ongoing(self, look: Look) -> dict[str, int]:
        left, found = len(look.waiting), dict(look.running)
        for name in self._order:
            pool = look.pools[name]
            most = pool.rules.max_workers * self._settings.target(pool.concurrency)
            part = min(left, max(0, math.ceil(most) - found[name]))
            found[name] += part
            left -= part
        found[self._order[-1]] += left
        return found

    def _decide(self, look: Look, name: str, ongoing: int) -> int:
        memory, settings = self._pools[name], self._settings
        current, target = look.ready[name], look.target[name]
        total = self._mean(memory, ongoing, look.now_s)
        if current == 0:  # the cold start fast path; else the policy keeps its target
            return max(1, target) if total > 0 else target
        wanted = total / settings.target(look.pools[name].concurrency)
        rules = look.pools[name].rules
        # The bounds are applied after the delays; a target beyond them would be wanted again.
        count = min(max(math.ceil(wanted - 1e-9), rules.min_workers), rules.max_workers)
        return self._delayed(memory.delay, count, target, look.now_s)

    def _mean(self, memory: _PoolMemory, ongoing: int, now_s: float) -> float:
        """Over the look back, of the samples sent last: one a second, sent every interval."""
        memory.samples.append((now_s, float(ongoing)))
        while memory.samples[0][0] < now_s - self._settings.look_back_period_s:
            memory.samples.popleft()
        if now_s - memory.sent_s >= self._settings.metrics_interval_s:
            memory.sent, memory.sent_s = list(memory.samples), now_s
        return time_weighted(memory.sent, now_s)

    def _delayed(self, delay: _Delay, wanted: int, target: int, now_s: float) -> int:
        sign = (wanted > target) - (wanted < target)
        if sign != delay.sign or not sign:
            delay.sign, delay.since_s = sign, now_s
        settings = self._settings
        wait_s = settings.upscale_delay_s if sign > 0 else settings.downscale_delay_s
        if not sign or now_s - delay.since_s < wait_s:
            return target
        delay.sign = 0
        # Serve goes to zero from one only.
        return wanted if sign > 0 or target == 1 else max(1, wanted)


def time_weighted(samples: Sequence[tuple[float, float]], now_s: float) -> float:
    """The mean of a step function whose last value holds until now."""
    if not samples:
        return 0.0
    ends = [*samples, (max(now_s, samples[-1][0] + 1e-3), 0.0)]
    total = sum(value * (after - at) for (at, value), (after, _) in pairwise(ends))
    return total / (ends[-1][0] - ends[0][0])


def grid(pools: Mapping[str, object]) -> list[tuple[ServeDefaults, tuple[str, ...]]]:
    """Settings of Serve's policy that an operator might try, with both orders of the pools."""
    orders = (tuple(pools), tuple(reversed(tuple(pools))))
    return [
        (
            ServeDefaults(
                per_place=share,
                upscale_delay_s=up_s,
                downscale_delay_s=down_s,
                metrics_interval_s=interval_s,
            ),
            order,
        )
        for share in (0.25, 0.5, 0.75, 1.0, 1.5)
        for up_s, interval_s in ((0.0, 1.0), (10.0, 5.0), (30.0, 10.0))
        for down_s in (30.0, 60.0, 120.0, 300.0, 600.0)
        for order in orders
    ]
