"""How many CPU threads a plan has: as asked, else every core, else what Ray gave."""

from __future__ import annotations

import json

import pytest

from polypath.runtime.errors import PlanError
from polypath.runtime.planning.hardware import Hardware, load_hardware
from polypath.runtime.planning.planner import plan
from polypath.tests.unit.planning.asking import wishes


@pytest.mark.parametrize(
    ("given", "threads"), [(None, 2), (0.25, 1), (1, 1), (1.5, 2), (2, 2), (16, 2)]
)
def test_a_worker_takes_no_more_threads_than_ray_gave_it(model, given, threads) -> None:
    hardware = load_hardware("avx2").with_cores_given(given)
    found = plan(hardware, model, wishes())
    assert (found.num_threads, found.origins["num_threads"]) == (threads, "hardware")
    said = [note for note in found.notes if "Ray gave this worker" in note]
    assert bool(said) == (threads < 2)


def test_a_number_that_is_asked_for_is_the_users(model) -> None:
    found = plan(load_hardware("avx2"), model, wishes(num_threads=1))
    assert (found.num_threads, found.origins["num_threads"]) == (1, "user")


def test_more_threads_than_cores_are_refused_with_the_reason(model) -> None:
    with pytest.raises(PlanError, match=r"--num-threads 3 is more than 2: .*cores"):
        plan(load_hardware("avx2"), model, wishes(num_threads=3))
    with pytest.raises(PlanError, match="Ray gave this worker 1 CPUs of 2"):
        plan(load_hardware("avx2").with_cores_given(1), model, wishes(num_threads=2))


def test_what_ray_gave_survives_json() -> None:
    hardware = load_hardware("avx2").with_cores_given(0.5)
    assert Hardware.from_json(json.loads(json.dumps(hardware.to_json()))) == hardware
