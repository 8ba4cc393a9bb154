"""How many workers each pool of a model should have: pure functions of what is queued, how fast
workers are, and what they cost. `autoscaling_serve.py` asks them in Ray Serve's controller,
`autoscaling_simulator.py` on recorded arrivals.

The rule (docs/autoscaling.md): the pools together must take what arrives at `max_utilization` of
their speed, and work off what waits within `target_queue_s`. Of all fleets that do, the cheapest is
wanted; with `prefer`, pools are filled in that order. What only some pools can serve is spread over
those first (`autoscaling_shares.py`). A pool whose workers do not come counts with those it has.
More workers are asked for at once, fewer only when no larger number was wanted for
`scale_down_delay_s`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import mul
from typing import Any

from .autoscaling_pools import Bound, Demand, PoolState, ScalingRules, Tokens
from .autoscaling_shares import Shares, spread, workers_alone

MAX_FLEETS = 4096  # that are compared one by one; beyond, pools are filled by price of their work
FULL = 0.95  # of the fleet's speed: no more workers are asked for while this would do
SHARED_TOKENS_S = 100.0  # of a pool that never ran, beside none that did

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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    """What one decision is about."""

    rules: ScalingRules
    pools: Mapping[str, PoolState]
    needs: Mapping[str, float]  # workers of each pool that alone would do for what all can serve
    bound: Bound
    least: int  # workers in all

    def spread(self, limits: Mapping[str, int], utilization: float | None = None) -> Shares:
        return spread(self.rules, self.pools, self.bound, limits, utilization=utilization)

    def counted(self, fleet: Mapping[str, int]) -> dict[str, int]:
        """Without the workers that do not come."""
        return {name: min(count, self.pools[name].ceiling) for name, count in fleet.items()}


def scale(
    rules: ScalingRules,
    pools: Mapping[str, PoolState],
    demand: Demand,
    memory: Memory,
    now_s: float,
    bound: Bound | None = None,
) -> Scaling:
    """Workers for each pool of one model. `demand` is what every pool can serve, `bound` what only
    some can. `now_s` is any clock that only goes forward.
    """
    pools = with_speeds(pools)
    case = _Case(
        rules=rules,
        pools=pools,
        needs=workers_alone(rules, demand, pools),
        bound=bound or {},
        least=1 if demand.num_unfinished else 0,
    )
    lean = _lean(case)
    delay_s = rules.scale_down_delay_s
    kept = {
        name: _remember(memory.get(name, [(now_s, pool.target)]), lean[name], now_s, delay_s)
        for name, pool in pools.items()
    }
    targets = _calm(case, lean, {name: kept[name][0][1] for name in pools})
    queue_s = expected_queue_s(pools, demand.waiting)
    return Scaling(targets=targets, memory=kept, queue_s=queue_s, why=_why(case, lean, targets))


def _lean(case: _Case) -> dict[str, int]:
    """The cheapest fleet of workers that may be counted on; and of pools whose workers do not come
    what one would like to have, so that they are used when they can be.
    """
    most = {name: pool.rules.max_workers for name, pool in case.pools.items()}
    sure = case.counted(most)
    fleet = _fleet(case, sure)
    if sure != most:
        hoped = _fleet(case, most)
        fleet |= {n: max(fleet[n], hoped[n]) for n in fleet if sure[n] < most[n]}
    return fleet


def _calm(case: _Case, lean: Mapping[str, int], largest: Mapping[str, int]) -> dict[str, int]:
    """What is there, less what was not wanted for the whole delay; and the lean fleet besides when
    that would be too little even when full.
    """
    stays = {n: _within(p, min(p.target, largest[n])) for n, p in case.pools.items()}
    there = case.counted(stays)
    shares = case.spread(there, FULL)
    by = case.rules.max_utilization / FULL
    least_needs = {name: need * by for name, need in case.needs.items()}
    is_enough = (
        covers(there, least_needs, shares.taken)
        and not any(shares.left.values())
        and sum(there.values()) >= min(1, sum(lean.values()))
    )
    return stays if is_enough else {name: max(stays[name], lean[name]) for name in lean}


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


def expected_queue_s(pools: Mapping[str, PoolState], waiting: Tokens) -> float:
    """Seconds until the ready workers have worked off what waits; infinity when there are none."""
    if not (waiting.prompt or waiting.new):
        return 0.0
    speed = sum(pool.ready / waiting.seconds(pool) for pool in pools.values())
    return 1.0 / speed if speed else math.inf


def _fleet(case: _Case, limits: Mapping[str, int]) -> dict[str, int]:
    """The cheapest numbers that cover the needs, or, with `prefer`, the first pools filled up."""
    pools, rules, needs = case.pools, case.rules, case.needs
    shares = case.spread(limits)
    if rules.prefer:
        order = [*rules.prefer, *(name for name in pools if name not in rules.prefer)]
        return _filled([name for name in order if name in pools], case, shares, limits)
    if math.prod(limits[name] - shares.wanted[name] + 1 for name in pools) > MAX_FLEETS:
        order = sorted(pools, key=lambda name: pools[name].rules.price * needs[name])
        return _filled(order, case, shares, limits)
    found = min(_fleets(case, shares, limits), default=None)
    return dict(limits) if found is None else dict(zip(pools, found[2], strict=True))


def _fleets(
    case: _Case, shares: Shares, limits: Mapping[str, int]
) -> Iterator[tuple[float, int, tuple[int, ...]]]:
    """Price, size and numbers of every fleet that is enough and no larger in its last pool."""
    *names, last = case.pools
    prices = [pool.rules.price for pool in case.pools.values()]
    parts = [1.0 / need if need else math.inf for need in case.needs.values()]  # that one covers
    taken, least = [shares.taken[name] for name in case.pools], shares.wanted[last]
    for counts in product(*(range(shares.wanted[n], limits[n] + 1) for n in names)):
        done = sum((n - t) * p for n, t, p in zip(counts, taken, parts, strict=False) if n > t)
        lacking = math.ceil((1.0 - done) / parts[-1] + taken[-1] - 1e-9) if done < 1.0 else 0
        rest = max(least, lacking, case.least - sum(counts))
        if rest <= limits[last]:
            fleet = (*counts, rest)
            yield sum(map(mul, fleet, prices)), sum(fleet), fleet


def covers(
    fleet: Mapping[str, int], needs: Mapping[str, float], taken: Mapping[str, float]
) -> bool:
    """Whether these workers, without the part of them that is `taken`, together do what each pool
    alone would need `needs` workers for.
    """
    if not any(needs.values()):
        return True
    free = {name: max(0.0, count - taken[name]) for name, count in fleet.items()}
    return sum(free[name] / needs[name] for name in fleet) >= 1.0 - 1e-9


def _filled(
    order: list[str], case: _Case, shares: Shares, limits: Mapping[str, int]
) -> dict[str, int]:
    """One pool after the other up to its ceiling, until the needs are covered."""
    fleet = dict(shares.wanted)
    for name in order:
        while fleet[name] < limits[name] and (
            sum(fleet.values()) < case.least or not covers(fleet, case.needs, shares.taken)
        ):
            fleet[name] += 1
    return fleet


def _remember(
    history: Sequence[tuple[float, int]], count: int, now_s: float, delay_s: float
) -> list[tuple[float, int]]:
    """The history with this wish: older ones that are over, or no larger, fall out."""
    fresh = [(t, n) for t, n in history if now_s - t < delay_s and n > count]
    return [*fresh, (now_s, count)]


def _why(case: _Case, lean: Mapping[str, int], targets: Mapping[str, int]) -> str:
    parts: list[str] = []
    for name, pool in case.pools.items():
        need = case.needs[name]
        said = f"{name}: {pool.ready} ready, {need:.2f} alone would do, {lean[name]} wanted"
        said += f", {targets[name]} kept" if targets[name] > lean[name] else ""
        late = pool.ceiling < pool.rules.max_workers
        parts.append(said + (f", no more come for {pool.lacking_s:.0f} s" if late else ""))
    for able, demand in case.bound.items():
        if demand.num_unfinished:
            pools = " or ".join(sorted(able))
            parts.append(f"{demand.num_unfinished} answers that only {pools} can give")
    return "; ".join(parts)
