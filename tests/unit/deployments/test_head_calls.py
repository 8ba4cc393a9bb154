"""A head that does not answer keeps nobody waiting for long, and no thread that others need."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from polypath.deployments.head_calls import HeadCalls

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_answers_and_errors_come_through() -> None:
    calls = HeadCalls("test")
    assert await calls.ask(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await calls.ask(divmod, 7, 0)
    calls.close()


async def test_a_silent_head_ends_calls_in_time_and_those_behind_are_not_made() -> None:
    calls, silent = HeadCalls("test", limit_s=0.1), threading.Event()
    made: list[int] = []

    def ask(number: int) -> None:
        made.append(number)
        silent.wait(10)

    began_s = time.monotonic()
    found = await asyncio.gather(*(calls.ask(ask, n) for n in range(20)), return_exceptions=True)
    assert all(isinstance(each, TimeoutError) for each in found)
    assert await asyncio.to_thread(lambda: "here") == "here"
    assert time.monotonic() - began_s < 2 and made == [0]
    silent.set()
    assert await calls.ask(lambda: "back") == "back"
    assert made == [0]
    calls.close()
