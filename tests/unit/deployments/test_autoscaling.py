"""Workers follow tokens over speed: the cheapest fleet that is enough, up at once, down later."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polypath.deployments.autoscaling import (
    Memory,
    Scaling,
    expected_queue_s,
    scale,
    with_speeds,
)
from polypath.deployments.autoscaling_pools import (
    Demand,
    PoolRules,
    PoolState,
    ScalingRules,
    Tokens,
)
from polypath.runtime.errors import ConfigurationError

SLOW = PoolState(
    rules=PoolRules(min_workers=0, max_workers=4, price=1.0, cold_start_s=20.0),
    ready=0,
    target=0,
    prefill_tokens_s=1000.0,
    decode_tokens_s=100.0,
)
FAST = PoolState(
    rules=PoolRules(min_workers=0, max_workers=3, price=5.0, cold_start_s=60.0),
    ready=0,
    target=0,
    prefill_tokens_s=10_000.0,
    decode_tokens_s=1000.0,
)
POOLS = {"slow": SLOW, "fast": FAST}
RULES = ScalingRules(target_queue_s=5.0, scale_down_delay_s=100.0, max_utilization=0.75)


def steady(tokens_s: float) -> Demand:
    """Answers of so many tokens a second in all, none of them waiting."""
    return Demand(arriving=Tokens(new=tokens_s), num_unfinished=1 if tokens_s else 0)


def run(
    steps: list[tuple[float, Demand]],
    pools: dict[str, PoolState] = POOLS,
    rules: ScalingRules = RULES,
) -> list[dict[str, int]]:
    """Targets after each (time, demand), with workers ready at once."""
    memory: Memory = {}
    found: list[dict[str, int]] = []
    for now_s, demand in steps:
        result = scale(rules, pools, demand, memory, now_s)
        memory = result.memory
        found.append(result.targets)
        pools = {
            name: replace(pool, ready=result.targets[name], target=result.targets[name])
            for name, pool in pools.items()
        }
    return found


def once(demand: Demand, **pools: PoolState) -> Scaling:
    return scale(RULES, pools or POOLS, demand, {}, 0.0)


def test_nothing_to_do_and_no_floor_is_no_worker() -> None:
    assert once(Demand()).targets == {"slow": 0, "fast": 0}


def test_one_waiting_answer_wakes_one_worker_of_the_cheapest_pool() -> None:
    waiting = Demand(waiting=Tokens(prompt=10, new=20), num_unfinished=1)
    assert once(waiting).targets == {"slow": 1, "fast": 0}


def test_the_cheap_pool_comes_first_and_the_dear_one_when_it_is_the_cheaper_whole() -> None:
    targets = [once(steady(rate)).targets for rate in (50.0, 140.0, 290.0, 600.0, 800.0)]
    assert targets == [
        {"slow": 1, "fast": 0},
        {"slow": 2, "fast": 0},
        {"slow": 4, "fast": 0},
        {"slow": 0, "fast": 1},
        {"slow": 1, "fast": 1},
    ]


def test_prefer_fills_pools_in_its_order() -> None:
    rules = replace(RULES, prefer=("slow",))
    found = scale(rules, POOLS, steady(600.0), {}, 0.0)
    assert found.targets == {"slow": 4, "fast": 1}


def test_more_than_all_pools_hold_asks_for_all() -> None:
    assert once(steady(1e6)).targets == {"slow": 4, "fast": 3}


def test_scales_on_tokens_and_not_on_their_number_of_answers() -> None:
    many_short = Demand(waiting=Tokens(new=100.0), num_unfinished=100)
    few_long = Demand(waiting=Tokens(new=20_000.0), num_unfinished=2)
    assert sum(once(many_short).targets.values()) == 1
    assert once(few_long).targets["fast"] >= 1


def test_the_floor_holds_without_any_load() -> None:
    slow = replace(SLOW, rules=replace(SLOW.rules, min_workers=2))
    assert once(Demand(), slow=slow, fast=FAST).targets == {"slow": 2, "fast": 0}


def test_goes_down_only_after_the_whole_delay() -> None:
    found = run([(0.0, steady(290.0)), (99.0, steady(50.0)), (101.0, steady(50.0))])
    assert [each["slow"] for each in found] == [4, 4, 1]


def test_a_peak_within_the_delay_starts_it_anew() -> None:
    steps = [(0.0, steady(290.0)), (60.0, steady(290.0)), (101.0, steady(50.0))]
    assert run(steps)[-1]["slow"] == 4
    assert run([*steps, (161.0, steady(50.0))])[-1]["slow"] == 1


def test_goes_to_zero_after_the_delay() -> None:
    found = run([(0.0, steady(50.0)), (50.0, Demand()), (99.0, Demand()), (150.0, Demand())])
    assert [sum(each.values()) for each in found] == [1, 1, 1, 0]


def test_a_load_that_swings_about_a_threshold_starts_nothing_twice() -> None:
    swing = [(float(n), steady(75.0 + 10.0 * (-1) ** n)) for n in range(300)]
    counts = [each["slow"] for each in run(swing)]
    assert sum(b > a for a, b in pairwise(counts)) <= 1
    assert min(counts[5:]) == max(counts[5:])


def test_a_full_fleet_is_not_exchanged_for_a_cheaper_one_of_the_same_speed() -> None:
    slow = replace(SLOW, ready=4, target=4)
    found = scale(RULES, {"slow": slow, "fast": FAST}, steady(370.0), {}, 0.0)
    assert found.targets == {"slow": 4, "fast": 0}


def test_a_controller_that_forgot_keeps_what_is_there_for_the_delay() -> None:
    fast = replace(FAST, ready=2, target=2)
    found = scale(RULES, {"slow": SLOW, "fast": fast}, Demand(), {}, 7.0)
    assert found.targets["fast"] == 2


def test_what_never_ran_is_taken_to_cost_what_others_cost() -> None:
    unknown = replace(FAST, prefill_tokens_s=0.0, decode_tokens_s=0.0)
    found = with_speeds({"slow": SLOW, "fast": unknown})["fast"]
    assert (found.prefill_tokens_s, found.decode_tokens_s) == (5000.0, 500.0)
    assert with_speeds({"fast": unknown})["fast"].decode_tokens_s > 0


def test_expected_queue_time_is_tokens_over_speed() -> None:
    slow = replace(SLOW, ready=2)
    waiting = Tokens(prompt=1000.0, new=300.0)  # 1 s and 3 s of one worker
    assert expected_queue_s({"slow": slow}, waiting) == pytest.approx(2.0)
    assert expected_queue_s({"slow": slow}, Tokens()) == 0.0
    assert math.isinf(expected_queue_s({"slow": SLOW}, waiting))


def test_many_pools_are_filled_by_the_price_of_their_work() -> None:
    rules = PoolRules(min_workers=0, max_workers=20)
    pools = {f"p{n}": replace(SLOW, rules=replace(rules, price=2.0 + n)) for n in range(4)}
    found = scale(RULES, pools, steady(2000.0), {}, 0.0)
    assert found.targets == {"p0": 20, "p1": 7, "p2": 0, "p3": 0}


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_workers": 3, "max_workers": 2},
        {"min_workers": -1},
        {"min_workers": 0, "max_workers": 0},
        {"price": 0.0},
        {"cold_start_s": 0.0},
    ],
)
def test_rules_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        PoolRules(**wrong)  # pyright: ignore[reportArgumentType]


@settings(max_examples=60, deadline=None)
@given(
    rates=st.lists(st.floats(0, 5000), min_size=1, max_size=12),
    floor=st.integers(0, 2),
    step_s=st.floats(1, 200),
)
def test_never_beyond_the_bounds_and_never_too_little(
    rates: list[float], floor: int, step_s: float
) -> None:
    slow = replace(SLOW, rules=replace(SLOW.rules, min_workers=floor))
    steps = [(n * step_s, steady(rate)) for n, rate in enumerate(rates)]
    for targets, rate in zip(run(steps, {"slow": slow, "fast": FAST}), rates, strict=True):
        assert floor <= targets["slow"] <= 4 and 0 <= targets["fast"] <= 3
        speed = 100.0 * targets["slow"] + 1000.0 * targets["fast"]
        assert speed >= rate * 0.999 or targets == {"slow": 4, "fast": 3}
        assert sum(targets.values()) >= (1 if rate else 0)
