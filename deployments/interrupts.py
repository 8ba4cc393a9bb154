"""Ctrl-C, SIGTERM and a closed terminal: the first asks for an orderly stop, the second ends at
once.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopAsked(BaseException):
    """The user wants to stop. Not an Exception: nothing on the way may take it for a failure."""


class Interrupts:
    """While entered, signals set a flag that `sleep` and `wait_for` look at; they never break into
    a running call.
    """

    def __init__(self, on_second: Callable[[], None]) -> None:
        self._on_second = on_second
        self._asked = threading.Event()
        self._old: dict[signal.Signals, object] = {}
        self._last_s = 0.0

    def __enter__(self) -> Interrupts:
        self._old = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)  # type: ignore[arg-type]  # what signal() gave us

    def renew(self) -> None:
        """Take the signals back from a library that has put its own handlers in front of ours.

        Ray's C++ part does so for SIGTERM: it writes a stack before it calls ours, and aborts the
        process where that takes longer than 3 s.
        """
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def sleep(self, seconds: float) -> None:
        """Sleep, or raise StopAsked."""
        if self._asked.wait(seconds):
            raise StopAsked

    def wait_for(self, future: Future[T]) -> T:
        """The future's result; StopAsked once a signal comes, with the future still running."""
        while not future.done():
            self.sleep(0.02)
        return future.result()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        # A terminal's Ctrl-C can reach us twice (once by way of `make`); that is still one wish.
        if self._asked.is_set() and now - self._last_s > 0.5:
            self._on_second()
        if not self._asked.is_set():
            self._last_s = now
        self._asked.set()
