"""Calibration: what it measures, what it leaves behind, and how live steps keep it true."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from polypath.runtime.calibration import Calibration, _Run, calibrate
from polypath.runtime.config import EngineConfig
from polypath.runtime.engine import Engine
from polypath.runtime.speeds import SpeedMeter, Speeds
from polypath.runtime.startup import Started, start
from polypath.tests import driving, tiny_models


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Started:
    folder = tmp_path_factory.mktemp("random")
    tiny_models.random(folder)
    return start(EngineConfig(model=str(folder), self_check=False, max_num_seqs=16))


def test_it_measures_prefill_and_decode_at_several_batch_sizes(started: Started) -> None:
    found = calibrate(started, limit_s=30.0, aim_s=20.0)
    assert [rows for rows, _ in found.speeds.step_s] == [1, 2, 4, 8, 16]
    assert found.speeds.prefill_tokens_s > 0
    assert 4 <= found.concurrency <= 16
    assert found.seconds < 30.0


def test_it_leaves_no_page_and_no_prefix_behind(started: Started) -> None:
    calibrate(started)
    assert started.pages.num_free == started.pages.num_usable
    assert started.pages.num_used == 0
    driving.assert_empty(Engine(started))


def test_it_stops_when_its_time_is_up(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that takes half a second: one batch size, then no more."""
    now = [0.0]
    monkeypatch.setattr("polypath.runtime.calibration.time.perf_counter", lambda: now[0])
    real = _Run._step

    def slow(self: _Run) -> float:
        real(self)
        now[0] += 0.4
        return 0.4

    monkeypatch.setattr(_Run, "_step", slow)
    found = calibrate(started)
    assert [rows for rows, _ in found.speeds.step_s] == [1]
    assert found.seconds < 5.0
    assert found.concurrency == 16, "where the best was not reached, all that may run"


def test_a_worker_may_skip_it(tmp_path: Path) -> None:
    tiny_models.random(tmp_path)
    config = EngineConfig(model=str(tmp_path), self_check=False, calibration=False)
    engine = Engine.build(config, calibrates=True)
    assert engine.calibration is None
    assert engine.plan.events[-1].stage == "calibration"
    assert engine.plan.events[-1].message == "skipped, as asked"


def test_the_plan_tells_what_was_measured(tmp_path: Path) -> None:
    tiny_models.random(tmp_path)
    config = EngineConfig(model=str(tmp_path), self_check=False, max_num_seqs=2)
    engine = Engine.build(config, calibrates=True)
    assert engine.calibration is not None
    assert engine.calibration.concurrency == 2
    assert "requests at once" in engine.plan.events[-1].message
    assert engine.stats()["speeds"] == engine.calibration.speeds.to_json()
    assert sum(engine.counters.steps.values()) == 0, "its steps are not the engine's"


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (((1, 0.1), (2, 0.1), (4, 0.1), (8, 0.1)), 32),  # free rows: all of them
        (((1, 0.013), (4, 0.016), (8, 0.0286), (16, 0.066)), 32),  # 280 a second, then 242: noise
        (((1, 0.1), (2, 0.11), (4, 0.13), (8, 0.24), (16, 0.8)), 8),  # 33 a second, then 20
        (((1, 0.1), (2, 0.3), (4, 0.7)), 4),  # slower at once: the least
        (((1, 0.1), (2, 0.2), (4, 0.4)), 32),  # nothing to gain, and nothing to lose
        (((1, 0.1), (2, 0.11), (4, 0.13)), 32),  # it still rose when time was up
        ((), 32),
    ],
)
def test_concurrency_is_the_largest_batch_that_is_not_plainly_slower(
    started: Started, steps: tuple[tuple[int, float], ...], expected: int
) -> None:
    run = _Run(replace(started, plan=replace(started.plan, max_num_seqs=32)))
    assert run._concurrency(Speeds(step_s=steps)) == expected


def test_speeds_between_and_beyond_what_was_measured() -> None:
    speeds = Speeds(step_s=((1, 0.1), (4, 0.13), (8, 0.25)))
    assert speeds.decode_step_s(1) == 0.1
    assert speeds.decode_step_s(2) == pytest.approx(0.11)
    assert speeds.decode_step_s(6) == pytest.approx(0.19)
    assert speeds.decode_step_s(16) == pytest.approx(0.1 + 15 * 0.15 / 7)
    assert speeds.decode_tokens_s(8) == pytest.approx(32)
    assert Speeds().decode_step_s(4) == Speeds().decode_tokens_s(4) == 0.0
    assert Speeds(step_s=((2, 0.1),)).decode_step_s(4) == pytest.approx(0.2)
    assert Speeds.from_json(speeds.to_json()) == speeds
    assert Speeds.from_json(None) == Speeds()


def test_live_steps_move_the_averages_of_their_own_batch_sizes() -> None:
    meter = SpeedMeter(Speeds(prefill_tokens_s=1000.0, step_s=((1, 0.1), (4, 0.2), (8, 0.4))))
    for _ in range(60):
        meter.observe(4, True, 0.3)
        meter.observe(100, False, 0.2)
        meter.observe(0, True, 9.0)
    speeds = meter.speeds()
    assert speeds.decode_step_s(1) == 0.1
    assert speeds.decode_step_s(4) == pytest.approx(0.3, rel=0.01)
    assert speeds.decode_step_s(8) == 0.4
    assert speeds.prefill_tokens_s == pytest.approx(500.0, rel=0.01)


def test_a_meter_learns_from_nothing() -> None:
    meter = SpeedMeter()
    assert meter.speeds() == Speeds()
    meter.observe(3, True, 0.3)
    meter.observe(50, False, 0.1)
    assert meter.speeds().step_s == ((3, 0.3),)
    assert meter.speeds().prefill_tokens_s == pytest.approx(500.0)


def test_the_description_is_plain_json() -> None:
    speeds = Speeds(prefill_tokens_s=5.0, step_s=((1, 0.5),))
    said = Calibration(speeds=speeds, concurrency=4, seconds=0.25).to_json()
    assert said == {
        "speeds": {"prefill_tokens_s": 5.0, "step_s": [[1, 0.5]]},
        "concurrency": 4,
        "seconds": 0.25,
    }
