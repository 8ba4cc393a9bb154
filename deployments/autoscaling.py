"""How many workers each pool of a model should have: pure functions of what is queued, how fast
workers are, and what they cost. `autoscaling_serve.py` asks them in Ray Serve's controller,
`autoscaling_simulator.py` on recorded arrivals.

The rule (docs/autoscaling.md): the pools together must take what arrives at `max_utilization` of
their speed, and work off what waits within `target_queue_s`. Of all fleets that do, the cheapest is
wanted; with `prefer`, pools are filled in that order. More workers are asked for at once, fewer
only when no larger number was wanted for `scale_down_delay_s`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from operator import mul
from typing import Any

from ..runtime.errors import ConfigurationError

MAX_FLEETS = 4096  # that are compared one by one; beyond, pools are filled by price of their work
PATIENCE = 1.0  # of the shortest cold start: what waits counts over this and target_queue_s
FULL = 0.95  # of the fleet's speed: no more workers are asked for while this would do
SHARED_TOKENS_S = 100.0  # of a pool that never ran, beside none that did


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolRules:
    """What a pool may have, and what it costs."""

    min_workers: int = 1
    max_workers: int = 1
    price: float = 1.0  # of one worker for an hour, in any currency
    cold_start_s: float = 60.0  # from the wish for a worker to its first token

    def __post_init__(self) -> None:
        if not 0 <= self.min_workers <= self.max_workers or self.max_workers < 1:
            raise ConfigurationError(
                f"min_workers {self.min_workers} and max_workers {self.max_workers}: give at least "
                "0 and 1, and not less than min_workers as max_workers"
            )
        if not (self.price > 0 and self.cold_start_s > 0):
            raise ConfigurationError(
                f"price {self.price:g} and cold_start_s {self.cold_start_s:g} must be above 0"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingRules:
    """How a model's pools follow its load."""

    target_queue_s: float = 5.0  # a new answer should not wait longer than this for a worker
    scale_down_delay_s: float = 120.0  # a worker that has not been wanted for so long goes
    max_utilization: float = 0.75  # of the fleet's measured speed that what arrives may take
    prefer: tuple[str, ...] = ()  # pools in the order in which they are filled

    def __post_init__(self) -> None:
        if not (self.target_queue_s > 0 and self.scale_down_delay_s >= 0):
            raise ConfigurationError(
                f"target_queue_s {self.target_queue_s:g} must be above 0, and scale_down_delay_s "
                f"{self.scale_down_delay_s:g} not below"
            )
        if not 0 < self.max_utilization <= 1:
            raise ConfigurationError(
                f"max_utilization is {self.max_utilization:g}; it must be above 0 and at most 1"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """Of prompts, and of answers still to come."""

    prompt: float = 0.0
    new: float = 0.0

    def seconds(self, pool: PoolState) -> float:
        """That one worker of the pool takes for them, with as many at once as suit it."""
        return self.prompt / pool.prefill_tokens_s + self.new / pool.decode_tokens_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """Of one model, at all gateways together; or the part of it that not every pool can serve."""

    arriving: Tokens = field(default_factory=Tokens)  # a second, lately
    waiting: Tokens = field(default_factory=Tokens)  # of answers that no worker has begun
    num_unfinished: int = 0  # answers that wait or run


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolState:
    """A pool as it is. Speeds are one worker's, of all its requests together; 0.0 unknown."""

    rules: PoolRules
    ready: int
    target: int  # what Serve works towards: ready ones and those on their way
    prefill_tokens_s: float = 0.0
    decode_tokens_s: float = 0.0
    bound: Demand = field(default_factory=Demand)  # its own: some other pools cannot serve it


Memory = dict[str, list[tuple[float, int]]]
"""Of each pool: when which numbers were wanted, falling, so that the first is the largest since."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """What is wanted now, and what it is for."""

    targets: dict[str, int]  # workers by pool
    memory: Memory
    queue_s: float  # that a new answer is expected to wait with the workers that are ready
    why: str

    def to_json(self) -> dict[str, Any]:  # JSON
        """For whoever asks what the policy thinks."""
        return {
            "targets": self.targets,
            "queue_s": None if math.isinf(self.queue_s) else round(self.queue_s, 3),
            "why": self.why,
        }


def scale(
    rules: ScalingRules,
    pools: Mapping[str, PoolState],
    demand: Demand,
    memory: Memory,
    now_s: float,
) -> Scaling:
    """Workers for each pool of one model. `now_s` is any clock that only goes forward."""
    pools = {name: _with_floor(rules, pool) for name, pool in with_speeds(pools).items()}
    needs = {name: _need(rules, pool, demand, pools) for name, pool in pools.items()}
    lean = _fleet(rules, pools, needs, demand)
    delay_s = rules.scale_down_delay_s
    kept = {
        name: _remember(memory.get(name, [(now_s, pool.target)]), lean[name], now_s, delay_s)
        for name, pool in pools.items()
    }
    targets = _calm(rules, pools, needs, lean, {name: kept[name][0][1] for name in pools})
    queue_s = expected_queue_s(pools, demand.waiting)
    why = _why(pools, needs, lean, targets)
    return Scaling(targets=targets, memory=kept, queue_s=queue_s, why=why)


def _calm(
    rules: ScalingRules,
    pools: Mapping[str, PoolState],
    needs: Mapping[str, float],
    lean: Mapping[str, int],
    largest: Mapping[str, int],
) -> dict[str, int]:
    """What is there, less what was not wanted for the whole delay; and the lean fleet besides when
    that would be too little even when full.
    """
    stays = {name: _within(pool, min(pool.target, largest[name])) for name, pool in pools.items()}
    least_needs = {name: need * rules.max_utilization / FULL for name, need in needs.items()}
    is_enough = covers(stays, least_needs) and sum(stays.values()) >= min(1, sum(lean.values()))
    return stays if is_enough else {name: max(stays[name], lean[name]) for name in pools}


def _within(pool: PoolState, count: int) -> int:
    return min(max(count, pool.rules.min_workers), pool.rules.max_workers)


def with_speeds(pools: Mapping[str, PoolState]) -> dict[str, PoolState]:
    """Pools that never ran get the speed that makes their work cost what the others' costs."""
    known = [pool for pool in pools.values() if pool.decode_tokens_s and pool.prefill_tokens_s]
    found: dict[str, PoolState] = {}
    for name, pool in pools.items():
        prefill, decode = pool.prefill_tokens_s, pool.decode_tokens_s
        if not (prefill and decode):
            like = min(known, key=lambda each: each.rules.price, default=None)
            share = pool.rules.price / like.rules.price if like else 1.0
            prefill = share * (like.prefill_tokens_s if like else SHARED_TOKENS_S)
            decode = share * (like.decode_tokens_s if like else SHARED_TOKENS_S)
        found[name] = replace(pool, prefill_tokens_s=prefill, decode_tokens_s=decode)
    return found


def _with_floor(rules: ScalingRules, pool: PoolState) -> PoolState:
    """With the workers that its own demand needs as its least."""
    bound, own = pool.bound, pool.rules
    if not bound.num_unfinished:
        return pool
    load = bound.arriving.seconds(pool) / rules.max_utilization
    load += bound.waiting.seconds(pool) / (rules.target_queue_s + PATIENCE * own.cold_start_s)
    floor = min(max(1, own.min_workers, math.ceil(load - 1e-9)), own.max_workers)
    return replace(pool, rules=replace(own, min_workers=floor))


def expected_queue_s(pools: Mapping[str, PoolState], waiting: Tokens) -> float:
    """Seconds until the ready workers have worked off what waits; infinity when there are none."""
    if not (waiting.prompt or waiting.new):
        return 0.0
    speed = sum(pool.ready / waiting.seconds(pool) for pool in pools.values())
    return 1.0 / speed if speed else math.inf


def _need(
    rules: ScalingRules, pool: PoolState, demand: Demand, pools: Mapping[str, PoolState]
) -> float:
    """Workers of this pool that would do if there were no other; not a whole number.

    What waits now is worked off meanwhile by the workers that are there or coming, so it counts
    over a part of the time that a new one takes to come.
    """
    cold_start_s = min(each.rules.cold_start_s for each in pools.values())
    patience_s = rules.target_queue_s + PATIENCE * cold_start_s
    load = demand.arriving.seconds(pool) / rules.max_utilization
    return load + demand.waiting.seconds(pool) / patience_s


def _fleet(
    rules: ScalingRules,
    pools: Mapping[str, PoolState],
    needs: Mapping[str, float],
    demand: Demand,
) -> dict[str, int]:
    """The cheapest numbers that cover the needs, or, with `prefer`, the first pools filled up."""
    least = 1 if demand.num_unfinished else 0
    if rules.prefer:
        order = [*rules.prefer, *(name for name in pools if name not in rules.prefer)]
        return _filled([name for name in order if name in pools], pools, needs, least)
    spans = [pool.rules.max_workers - pool.rules.min_workers + 1 for pool in pools.values()]
    if math.prod(spans) > MAX_FLEETS:
        order = sorted(pools, key=lambda name: pools[name].rules.price * needs[name])
        return _filled(order, pools, needs, least)
    found = min(_fleets(list(pools), pools, needs, least), default=None)
    if found is None:
        return {name: pool.rules.max_workers for name, pool in pools.items()}
    return dict(zip(pools, found[2], strict=True))


def _fleets(
    names: Sequence[str], pools: Mapping[str, PoolState], needs: Mapping[str, float], least: int
) -> Iterator[tuple[float, int, tuple[int, ...]]]:
    """Price, size and numbers of every fleet that is enough and no larger in its last pool."""
    rules = [pools[name].rules for name in names]
    prices = [rule.price for rule in rules]
    parts = [1.0 / needs[name] if needs[name] else math.inf for name in names]  # that one covers
    last = rules[-1]
    for counts in product(*(range(r.min_workers, r.max_workers + 1) for r in rules[:-1])):
        done = sum(n * part for n, part in zip(counts, parts[:-1], strict=True) if n)
        lacking = math.ceil((1.0 - done) / parts[-1] - 1e-9) if done < 1.0 else 0
        rest = max(last.min_workers, lacking, least - sum(counts))
        if rest <= last.max_workers:
            fleet = (*counts, rest)
            yield sum(map(mul, fleet, prices)), sum(fleet), fleet


def covers(fleet: Mapping[str, int], needs: Mapping[str, float]) -> bool:
    """Whether these workers together do what each pool alone would need `needs` workers for."""
    if not any(needs.values()):
        return True
    return sum(count / needs[name] for name, count in fleet.items()) >= 1.0 - 1e-9


def _filled(
    order: Sequence[str], pools: Mapping[str, PoolState], needs: Mapping[str, float], least: int
) -> dict[str, int]:
    """One pool after the other up to its ceiling, until the needs are covered."""
    fleet = {name: pool.rules.min_workers for name, pool in pools.items()}
    for name in order:
        while fleet[name] < pools[name].rules.max_workers and (
            sum(fleet.values()) < least or not covers(fleet, needs)
        ):
            fleet[name] += 1
    return fleet


def _remember(
    history: Sequence[tuple[float, int]], count: int, now_s: float, delay_s: float
) -> list[tuple[float, int]]:
    """The history with this wish: older ones that are over, or no larger, fall out."""
    fresh = [(t, n) for t, n in history if now_s - t < delay_s and n > count]
    return [*fresh, (now_s, count)]


def _why(
    pools: Mapping[str, PoolState],
    needs: Mapping[str, float],
    lean: Mapping[str, int],
    targets: Mapping[str, int],
) -> str:
    parts: list[str] = []
    for name, pool in pools.items():
        said = f"{name}: {pool.ready} ready, {needs[name]:.2f} alone would do, {lean[name]} wanted"
        own = pool.bound.num_unfinished
        said += f", {own} answers that not every pool can give" if own else ""
        parts.append(said + (f", {targets[name]} kept" if targets[name] > lean[name] else ""))
    return "; ".join(parts)
