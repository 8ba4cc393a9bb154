"""The simulator against cases that can be reckoned by hand, and Serve's formula against Serve."""

from __future__ import annotations

import pytest

from polypath.deployments.autoscaling_pools import PoolRules, ScalingRules
from polypath.deployments.autoscaling_scalers import (
    OurScaler,
    ServeDefaults,
    ServeScaler,
    time_weighted,
)
from polypath.deployments.autoscaling_simulator import Arrival, Look, SimulatedPool, simulate
from polypath.runtime.speeds import Speeds


def pool(*, least: int = 0, most: int = 4, cold_start_s: float = 10.0) -> SimulatedPool:
    """Two at once: alone 0.1 s a token, both 0.15; 100 prompt tokens a second; 3600 an hour."""
    return SimulatedPool(
        rules=PoolRules(
            min_workers=least, max_workers=most, price=3600.0, cold_start_s=cold_start_s
        ),
        speeds=Speeds(prefill_tokens_s=100.0, step_s=((1, 0.1), (2, 0.15))),
        concurrency=2,
    )


class Fixed:
    """Always so many."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.looks: list[Look] = []

    def targets(self, look: Look) -> dict[str, int]:
        self.looks.append(look)
        return {"p": self.count}


def test_a_warm_worker_answers_at_once_and_is_paid_for_all_the_while() -> None:
    found = simulate([Arrival(0.5, 100, 10)], {"p": pool(least=1)}, Fixed(1))
    assert found.waits_s == [0.0]
    assert found.cost == pytest.approx(3.0)  # 1 s of prompt, 1 s of answer, up to a whole tick
    assert found.num_starts == 0


def test_an_answer_waits_for_a_cold_worker_and_for_a_free_place() -> None:
    arrivals = [Arrival(0.5, 100, 10), Arrival(0.6, 100, 10), Arrival(0.7, 100, 10)]
    found = simulate(arrivals, {"p": pool()}, Fixed(1))
    # Ready at 10 s. The first takes 2 s; the second, beside it, 2 x 1 + 10 x 0.15.
    assert found.waits_s == pytest.approx([9.5, 9.4, 12.0 - 0.7])
    assert found.starts == {"p": 1}
    assert found.wait_s(50) == pytest.approx(9.5) and found.wait_s(100) == pytest.approx(11.3)


def test_a_worker_that_leaves_ends_its_answers_and_costs_until_then() -> None:
    class Leaving(Fixed):
        def targets(self, look: Look) -> dict[str, int]:
            return {"p": 1 if look.now_s < 3 else 0}

    arrivals = [Arrival(0.0, 100, 40), Arrival(20.0, 1, 1)]
    with pytest.raises(AssertionError):  # nobody is left for the second: bound the run
        simulate(arrivals, {"p": pool(cold_start_s=1.0)}, Bounded(Leaving(1), 60.0))


class Bounded(Fixed):
    """Fails when the run goes on for longer."""

    def __init__(self, inner: Fixed, limit_s: float) -> None:
        super().__init__(0)
        self._inner = inner
        self._limit_s = limit_s

    def targets(self, look: Look) -> dict[str, int]:
        if look.now_s >= self._limit_s:
            raise AssertionError(f"{len(look.waiting)} still wait")
        return self._inner.targets(look)


def test_no_answer_is_lost_from_zero_and_back() -> None:
    arrivals = [Arrival(5.0 + 0.1 * n, 50, 20) for n in range(40)]
    arrivals += [Arrival(600.0, 50, 20)]
    found = simulate(arrivals, {"p": pool()}, OurScaler(ScalingRules(scale_down_delay_s=30.0)))
    assert len(found.waits_s) == 41
    assert found.waits_s[-1] == pytest.approx(11.0, abs=1.1)  # cold again
    totals = [counts["p"] for _, counts in found.history]
    assert totals[0] == 0 and max(totals) >= 2 and totals[500] == 0


def test_the_same_run_gives_the_same_figures() -> None:
    arrivals = [Arrival(float(n), 50, 20) for n in range(60)]
    runs = [simulate(arrivals, {"p": pool()}, OurScaler(ScalingRules())) for _ in range(2)]
    assert runs[0] == runs[1]


def look(*, running: int, ready: int, target: int, now_s: float) -> Look:
    return Look(
        now_s=now_s,
        pools={"p": pool(most=10)},
        ready={"p": ready},
        target={"p": target},
        running={"p": running},
        num_bound={"p": 0},
        waiting=(),
        arrived=(),
        finished=(),
    )


@pytest.mark.parametrize(("ongoing", "current"), [(7, 2), (3, 2), (20, 1), (1, 3), (6, 3)])
def test_serves_formula_is_that_of_the_installed_serve(ongoing: int, current: int) -> None:
    """Without delays, our copy wants what Ray's own function wants for the same figures."""
    config = pytest.importorskip("ray.serve.config")
    policy = pytest.importorskip("ray.serve.autoscaling_policy")
    state = pytest.importorskip("ray.serve._private.common")
    settings = config.AutoscalingConfig(
        min_replicas=0, max_replicas=10, upscale_delay_s=0, downscale_delay_s=0
    )
    context = config.AutoscalingContext(
        deployment_id=state.DeploymentID("p"),
        deployment_name="p",
        app_name="a",
        current_num_replicas=current,
        target_num_replicas=current,
        running_replicas=[],
        total_num_requests=float(ongoing),
        capacity_adjusted_min_replicas=0,
        capacity_adjusted_max_replicas=10,
        policy_state={},
        current_time=0.0,
        config=settings,
        total_queued_requests=0.0,
        aggregated_metrics={},
        raw_metrics={},
        last_scale_up_time=None,
        last_scale_down_time=None,
    )
    theirs, _ = policy._apply_autoscaling_config(policy._core_replica_queue_length_policy)(context)
    ours = ServeScaler(ServeDefaults(upscale_delay_s=0, downscale_delay_s=0), ("p",))
    found = ours.targets(look(running=ongoing, ready=current, target=current, now_s=0.0))
    assert found["p"] == min(10, theirs)


def test_serves_delays_hold() -> None:
    scaler = ServeScaler(ServeDefaults(look_back_period_s=1.0, metrics_interval_s=1.0), ("p",))
    ups = [
        scaler.targets(look(running=8, ready=1, target=1, now_s=float(n)))["p"] for n in range(40)
    ]
    assert ups.index(4) == 30 and set(ups[:30]) == {1}
    downs = [
        scaler.targets(look(running=0, ready=4, target=4, now_s=40.0 + n))["p"] for n in range(640)
    ]
    assert 600 <= downs.index(1) <= 602
    assert 0 not in downs, "never to zero but from one"


def test_a_mean_over_time_counts_how_long_each_value_held() -> None:
    assert time_weighted([(0.0, 2.0), (1.0, 4.0)], 4.0) == pytest.approx((2 + 3 * 4) / 4)
    assert time_weighted([], 1.0) == 0.0
