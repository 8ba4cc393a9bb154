"""An event loop whose clock jumps to the next timer: minutes of paced work in milliseconds, and the
same on a busy machine.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    """Never waits: what it would have waited is added to the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everybody waits and nobody will come"
        self.now_s += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` moves only when nothing is left to do at the present moment."""

    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a virtual clock; within `work` use the loop's time, not `time.monotonic`."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
