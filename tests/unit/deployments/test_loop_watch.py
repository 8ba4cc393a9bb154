"""What holds an event loop up is told, with its place."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from polypath.deployments import loop_watch
from polypath.deployments.loop_watch import BLOCKED, STARVED, LoopWatch

pytestmark = pytest.mark.anyio
LATE_S = 0.3


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def block_here(seconds: float) -> None:
    time.sleep(seconds)


async def test_a_blocked_loop_is_told_of_with_its_place_and_its_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[tuple[str, float]] = []
    watch = LoopWatch(lambda *late: told.append(late), late_s=LATE_S, every_s=0.02)
    watch.start()
    with caplog.at_level(logging.WARNING, "polypath.loop"):
        await asyncio.sleep(0.05)
        block_here(0.7)
        await asyncio.sleep(0.1)
    (seconds,) = [seconds for kind, seconds in told if kind == BLOCKED and seconds > 0.5]
    assert seconds < 3
    assert "in block_here" in caplog.text and "told.append" not in caplog.text
    watch.close()
    num_told = len(told)
    block_here(0.5)
    await asyncio.sleep(0.05)
    assert len(told) == num_told, "closed"


async def test_a_loop_that_waits_is_not_held_up() -> None:
    told: list[tuple[str, float]] = []
    watch = LoopWatch(lambda *late: told.append(late), late_s=5.0, every_s=0.02)
    watch.start()
    await asyncio.sleep(0.2)
    watch.close()
    assert not told


async def test_a_process_that_got_no_time_is_another_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[str, float]] = []
    watch = LoopWatch(lambda *late: told.append(late), late_s=LATE_S, every_s=0.02)
    jumped_s = 0.0
    real = time.monotonic
    monkeypatch.setattr(loop_watch.time, "monotonic", lambda: real() + jumped_s)
    watch.start()
    await asyncio.sleep(0.1)
    jumped_s = 30.0  # as after SIGSTOP: for everybody at once
    await asyncio.sleep(0.2)
    watch.close()
    assert any(kind == STARVED and 29 < seconds < 32 for kind, seconds in told)
