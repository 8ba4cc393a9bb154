"""Who takes the demand that only some pools can serve: the cheapest able pool first, the next one
when that is full. Pure functions.

Demands that fewer pools can serve choose first. Room on workers that are wanted anyway is used
before another worker is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from .autoscaling_pools import Bound, Demand, PoolState, ScalingRules

PATIENCE = 1.0  # of the shortest cold start: what waits counts over this and target_queue_s
NOTHING = 1e-9  # workers, or a share of a demand


@dataclass(kw_only=True, slots=True)
class Shares:
    """Of each demand, what each pool takes; numbers of workers are not whole."""

    taken: dict[str, float]  # workers by pool
    wanted: dict[str, int]  # whole workers by pool: the least that it may have
    parts: dict[frozenset[str], dict[str, float]] = field(default_factory=dict)  # of 1, by pool
    left: dict[frozenset[str], float] = field(default_factory=dict)  # of 1, that finds no room


def workers_alone(
    rules: ScalingRules, demand: Demand, pools: Mapping[str, PoolState]
) -> dict[str, float]:
    """Workers of each pool that would do if there were no other; not whole numbers.

    What waits now is worked off meanwhile by the workers that are there or coming, so it counts
    over a part of the time that a new one takes to come.
    """
    cold_start_s = min(each.rules.cold_start_s for each in pools.values())
    patience_s = rules.target_queue_s + PATIENCE * cold_start_s
    return {
        name: demand.arriving.seconds(pool) / rules.max_utilization
        + demand.waiting.seconds(pool) / patience_s
        for name, pool in pools.items()
    }


def spread(
    rules: ScalingRules,
    pools: Mapping[str, PoolState],
    bound: Bound,
    limits: Mapping[str, int],
    *,
    utilization: float | None = None,
) -> Shares:
    """Every demand of `bound` over its pools, of which each has at most `limits` workers. With
    `utilization`, by that share of the workers' speed instead of the rules' own.
    """
    by = 1.0 if utilization is None else rules.max_utilization / utilization
    shares = Shares(
        taken=dict.fromkeys(pools, 0.0),
        wanted={name: min(pool.rules.min_workers, limits[name]) for name, pool in pools.items()},
    )
    for able, demand in sorted(bound.items(), key=lambda each: (len(each[0]), sorted(each[0]))):
        members = {name: pool for name, pool in pools.items() if name in able}
        if members and demand != Demand():
            needs = {n: by * need for n, need in workers_alone(rules, demand, members).items()}
            _give(shares, able, needs, _order(rules, members, needs), limits)
    return shares


def _order(
    rules: ScalingRules, pools: Mapping[str, PoolState], needs: Mapping[str, float]
) -> list[str]:
    """The pool to fill first in front: by `prefer`, then by what the work costs there."""

    def rank(name: str) -> tuple[int, float, float]:
        place = rules.prefer.index(name) if name in rules.prefer else len(rules.prefer)
        price = pools[name].rules.price
        return place, price * needs[name], price

    return sorted(pools, key=rank)


def _give(
    shares: Shares,
    able: frozenset[str],
    needs: Mapping[str, float],
    order: list[str],
    limits: Mapping[str, int],
) -> None:
    """Pool by pool as much of a demand as there is room for."""
    parts, left = dict.fromkeys(order, 0.0), 1.0
    for name, limit in _rooms(shares, order, limits):
        room = limit - shares.taken[name]
        if left <= NOTHING or limit < 1 or (room <= NOTHING and needs[name]):
            continue
        part = min(left, room / needs[name]) if needs[name] else left
        left -= part
        parts[name] += part
        shares.taken[name] += part * needs[name]
        whole = max(1, math.ceil(shares.taken[name] - NOTHING))
        shares.wanted[name] = max(shares.wanted[name], whole)
    shares.parts[able] = {name: part for name, part in parts.items() if part}
    shares.left[able] = left if left > NOTHING else 0.0


def _rooms(
    shares: Shares, order: list[str], limits: Mapping[str, int]
) -> Iterator[tuple[str, int]]:
    """First the workers that are wanted anyway, then all that may be."""
    yield from [(name, shares.wanted[name]) for name in order]
    yield from [(name, limits[name]) for name in order]
