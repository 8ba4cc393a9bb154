"""Python's garbage collector, kept from looking while an engine is made or a graph is captured.

What is made then stays: a full collection walks some 200,000 objects of torch and takes 0.2 s to
find none of it free.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Pauses:
    """Those of all threads together: the last to end lets the collector run again, if it did."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_open = 0
        self._was_enabled = False

    def begin(self) -> None:
        with self._lock:
            if not self._num_open:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._num_open += 1

    def end(self) -> None:
        with self._lock:
            self._num_open -= 1
            if not self._num_open and self._was_enabled:
                gc.enable()


_pauses = _Pauses()


@contextmanager
def paused() -> Iterator[None]:
    """Nothing is collected inside, in no thread; who had stopped the collector before all pauses
    finds it stopped.
    """
    _pauses.begin()
    try:
        yield
    finally:
        _pauses.end()
