"""Demand that only some pools can serve: never to one that cannot, the cheapest first, on to the
next where one is full or cannot be placed, and none of it lost.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polypath.deployments.autoscaling import Memory, scale
from polypath.deployments.autoscaling_pools import (
    Demand,
    Lack,
    PoolRules,
    PoolState,
    ScalingRules,
    Tokens,
    lack,
)
from polypath.deployments.autoscaling_scalers import OurScaler
from polypath.deployments.autoscaling_shares import spread, workers_alone
from polypath.deployments.autoscaling_simulator import Arrival, SimulatedPool, simulate
from polypath.runtime.speeds import Speeds

RULES = ScalingRules(target_queue_s=5.0, scale_down_delay_s=100.0, max_utilization=0.75)
SMALL = PoolState(
    rules=PoolRules(min_workers=0, max_workers=4, price=1.0, cold_start_s=20.0),
    ready=0,
    target=0,
    prefill_tokens_s=1000.0,
    decode_tokens_s=100.0,
)
LARGE = replace(SMALL, rules=replace(SMALL.rules, max_workers=2, price=3.0))
HUGE = replace(SMALL, rules=replace(SMALL.rules, max_workers=3, price=9.0))
POOLS = {"small": SMALL, "large": LARGE, "huge": HUGE}
LONG = frozenset({"large", "huge"})


def steady(workers: float) -> Demand:
    """What so many workers take at 75% of their speed."""
    return Demand(arriving=Tokens(new=75.0 * workers), num_unfinished=1)


def targets(
    demand: float, pools: dict[str, PoolState] = POOLS, rules: ScalingRules = RULES, any_: float = 0
) -> tuple[int, ...]:
    """Of small, large and huge, for so many workers' worth of what the last two can serve, and of
    what any can.
    """
    common = steady(any_) if any_ else Demand()
    found = scale(rules, pools, common, {}, 0.0, {LONG: steady(demand)}).targets
    return found["small"], found["large"], found["huge"]


def test_the_cheapest_able_pool_first_then_the_next_at_its_ceiling() -> None:
    assert [targets(n) for n in (0.5, 2.0, 2.1, 4.0, 99.0)] == [
        (0, 1, 0),
        (0, 2, 0),
        (0, 2, 1),
        (0, 2, 2),
        (0, 2, 3),
    ]


def test_prefer_goes_before_price() -> None:
    rules = replace(RULES, prefer=("huge",))
    assert [targets(n, rules=rules) for n in (0.5, 4.0)] == [(0, 0, 1), (0, 1, 3)]


def test_what_any_pool_can_serve_does_not_count_on_workers_that_are_full() -> None:
    assert targets(0.5, any_=0.5) == (0, 1, 0), "there is room beside it"
    assert targets(1.0, any_=0.9) == (1, 1, 0)


def test_an_awake_dearer_pool_with_room_keeps_it_until_the_delay_is_over() -> None:
    pools = POOLS | {"huge": replace(HUGE, ready=1, target=1)}
    memory: Memory = {}
    found = []
    for now_s in (0.0, 99.0, 101.0):
        result = scale(RULES, pools, Demand(), memory, now_s, {LONG: steady(0.5)})
        memory = result.memory
        found.append((result.targets["large"], result.targets["huge"]))
    assert found == [(0, 1), (0, 1), (1, 0)]


def test_a_pool_with_workers_that_do_not_come_is_spilled_from_and_still_asked() -> None:
    late = replace(LARGE, target=1, lacking_s=19.0)
    assert targets(0.5, POOLS | {"large": late}) == (0, 1, 0)
    assert targets(0.5, POOLS | {"large": replace(late, lacking_s=20.0)}) == (0, 1, 1)
    half = replace(LARGE, ready=1, target=2, lacking_s=20.0)
    assert targets(0.9, POOLS | {"large": half}) == (0, 2, 0), "what is there is enough"
    assert targets(1.5, POOLS | {"large": half}) == (0, 2, 1)


def test_what_any_pool_can_serve_is_spilled_from_it_too() -> None:
    late = replace(SMALL, target=2, lacking_s=20.0)
    pools = POOLS | {"small": late}
    assert scale(RULES, pools, steady(1.5), {}, 0.0).targets == {"small": 2, "large": 2, "huge": 0}
    alone = scale(RULES, {"small": late}, steady(1.5), {}, 0.0).targets
    assert alone == {"small": 2}, "nobody else is there to ask"


def test_a_floor_that_cannot_be_placed_is_no_error() -> None:
    rules = replace(LARGE.rules, min_workers=2)
    late = replace(LARGE, rules=rules, ready=1, target=2, lacking_s=60.0)
    assert targets(1.5, POOLS | {"large": late}) == (0, 2, 1)


def test_a_load_about_a_threshold_starts_nothing_twice() -> None:
    memory: Memory = {}
    pools, counts = dict(POOLS), []
    for n in range(300):
        demand = {LONG: steady(2.0 + 0.1 * (-1) ** n)}
        result = scale(RULES, pools, Demand(), memory, float(n), demand)
        memory = result.memory
        counts.append(result.targets["huge"])
        pools = {
            k: replace(p, ready=result.targets[k], target=result.targets[k])
            for k, p in pools.items()
        }
    assert sum(after > before for before, after in pairwise(counts)) <= 1
    assert min(counts[5:]) == max(counts[5:])


@pytest.mark.parametrize(
    ("before", "ready", "target", "now"),
    [
        (None, 2, 2, None),
        (None, 0, 1, (50.0, 0)),
        ((10.0, 1), 1, 2, (10.0, 1)),
        ((10.0, 1), 2, 3, (50.0, 2)),  # one came
        ((10.0, 2), 1, 3, (10.0, 1)),  # one went besides
        ((10.0, 1), 3, 3, None),
    ],
)
def test_a_pool_lacks_workers_since_the_last_one_came(
    before: Lack | None, ready: int, target: int, now: Lack | None
) -> None:
    assert lack(before, ready, target, 50.0) == now


NAMES = ("a", "b", "c", "d")
ABLE = st.frozensets(st.sampled_from(NAMES), min_size=1, max_size=3)
SPEED = st.floats(1.0, 10_000.0)
DEMAND = st.builds(
    Demand,
    arriving=st.builds(Tokens, prompt=st.floats(0, 1e5), new=st.floats(0, 1e4)),
    waiting=st.builds(Tokens, prompt=st.floats(0, 1e6), new=st.floats(0, 1e5)),
    num_unfinished=st.integers(1, 100),
)


@st.composite
def pool(draw: st.DrawFn) -> PoolState:
    most = draw(st.integers(1, 6))
    target = draw(st.integers(0, most))
    return PoolState(
        rules=PoolRules(
            min_workers=draw(st.integers(0, most)),
            max_workers=most,
            price=draw(st.floats(0.1, 50.0)),
            cold_start_s=draw(st.floats(1.0, 300.0)),
        ),
        ready=draw(st.integers(0, target)),
        target=target,
        prefill_tokens_s=draw(SPEED),
        decode_tokens_s=draw(SPEED),
        lacking_s=draw(st.sampled_from([0.0, 1000.0])),
    )


@settings(max_examples=80, deadline=None)
@given(
    pools=st.fixed_dictionaries({name: pool() for name in NAMES}),
    bound=st.dictionaries(ABLE, DEMAND, max_size=5),
    prefer=st.lists(st.sampled_from(NAMES), unique=True, max_size=2),
)
def test_every_demand_goes_to_able_pools_in_order_and_none_is_lost(
    pools: dict[str, PoolState], bound: dict[frozenset[str], Demand], prefer: list[str]
) -> None:
    rules = ScalingRules(prefer=tuple(prefer))
    limits = {name: each.ceiling for name, each in pools.items()}
    shares = spread(rules, pools, bound, limits)
    used = dict.fromkeys(pools, 0.0)
    for able, demand in bound.items():
        parts = shares.parts[able]
        needs = workers_alone(rules, demand, {name: pools[name] for name in able})
        assert parts.keys() <= able, "never to a pool that cannot serve it"
        assert sum(parts.values()) + shares.left[able] == pytest.approx(1.0)
        for name, part in parts.items():
            used[name] += part * needs[name]
        if shares.left[able]:
            assert all(limits[name] - shares.taken[name] <= 1e-6 for name in able), "all are full"
    for name in pools:
        assert shares.taken[name] == pytest.approx(used[name])
        assert shares.taken[name] <= limits[name] + 1e-6
        assert shares.taken[name] - 1e-6 <= shares.wanted[name] <= limits[name]


@settings(max_examples=80, deadline=None)
@given(
    pools=st.fixed_dictionaries({name: pool() for name in NAMES}),
    bound=st.dictionaries(ABLE, DEMAND, max_size=4),
    demand=st.one_of(st.just(Demand()), DEMAND),
)
def test_targets_keep_the_bounds_and_leave_no_answer_without_a_pool_that_may_serve_it(
    pools: dict[str, PoolState], bound: dict[frozenset[str], Demand], demand: Demand
) -> None:
    found = scale(ScalingRules(), pools, demand, {}, 0.0, bound).targets
    for name, each in pools.items():
        assert each.rules.min_workers <= found[name] <= each.rules.max_workers
    for able in bound:
        assert sum(found[name] for name in able) >= 1


def simulated(price: float, most: int, num_places: float = float("inf")) -> SimulatedPool:
    """Ten tokens a second, one answer at once."""
    return SimulatedPool(
        rules=PoolRules(min_workers=0, max_workers=most, price=price, cold_start_s=10.0),
        speeds=Speeds(prefill_tokens_s=1000.0, step_s=((1, 0.1),)),
        concurrency=1,
        num_places=num_places,
    )


@pytest.mark.parametrize("num_places", [float("inf"), 1, 0])
def test_simulated_long_answers_spill_and_short_ones_never_wait_behind_them(
    num_places: float,
) -> None:
    pools = {
        "small": simulated(1.0, 4),
        "large": simulated(3.0, 2, num_places),
        "huge": simulated(9.0, 4),
    }
    arrivals = [
        Arrival(0.5 + n, 10, 20, LONG if n % 2 else None) for n in range(240)
    ]  # a worker and a third of each kind
    found = simulate(arrivals, pools, OurScaler(RULES))
    assert len(found.waits_s) == len(arrivals), "none is lost"
    assert found.starts["small"] >= 1
    late = found.history[-30][1]  # lengths of answers are known by then
    if num_places < 2:
        assert found.starts["large"] == num_places and late["huge"] >= 1
    else:
        assert (late["large"], late["huge"]) == (2, 0)
    assert max(found.waits_s) <= 10.0 + 10.0 + 10.0, "a cold start, being told it is late, another"
