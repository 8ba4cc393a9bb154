"""Busy processes: on cores of their own, and gone when the measurement is."""

from __future__ import annotations

import os

import psutil
import pytest

from polypath.deployments.bench_busy import busy_cores
from polypath.runtime.errors import ConfigurationError


def test_each_keeps_one_core_busy_and_ends_with_the_block() -> None:
    cores = sorted(os.sched_getaffinity(0))
    with busy_cores(len(cores)) as pids:
        assert [os.sched_getaffinity(pid) for pid in pids] == [{core} for core in cores]
        assert all(psutil.pid_exists(pid) for pid in pids)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_they_end_when_the_measurement_fails() -> None:
    pids: list[int] = []
    with pytest.raises(RuntimeError), busy_cores(1) as started:
        pids += started
        raise RuntimeError
    assert pids and not psutil.pid_exists(pids[0])


@pytest.mark.parametrize("count", [-1, 10_000])
def test_more_than_there_are_cores_is_refused(count: int) -> None:
    with pytest.raises(ConfigurationError, match=f"--busy {count}.* give 0 to"), busy_cores(count):
        raise AssertionError("nothing may start")
