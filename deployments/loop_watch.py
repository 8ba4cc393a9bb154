"""Watches the event loop that answers requests: whatever holds it up holds up every answer.

A thread looks whether the loop still turns. When it does not, the log says where it is, which no
other trace does once it is over; when not even the thread ran, the machine had no time for us.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable

logger = logging.getLogger("polypath.loop")

EVERY_S = 0.25
LATE_S = 1.0  # a loop that has not turned for longer is told of
MAX_FRAMES = 12  # innermost ones
BLOCKED, STARVED = "blocked", "starved"

OnLate = Callable[[str, float], None]
"""Called on the loop: `blocked` or `starved`, and for how many seconds."""


class LoopWatch:
    """Start it on the loop that it watches, and close it there."""

    def __init__(
        self, on_late: OnLate, *, late_s: float = LATE_S, every_s: float = EVERY_S
    ) -> None:
        self._on_late = on_late
        self._late_s = late_s
        self._every_s = every_s
        self._loop = asyncio.get_running_loop()
        self._watched = threading.get_ident()
        self._turned_s = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop watch", daemon=True)

    def start(self) -> None:
        """Look from now on."""
        self._turn()
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._is_over.set()
        if self._timer is not None:
            self._timer.cancel()

    def _turn(self) -> None:
        self._turned_s = time.monotonic()
        self._timer = self._loop.call_later(self._every_s, self._turn)

    def _watch(self) -> None:
        looked_s, told_s = time.monotonic(), 0.0
        while not self._is_over.wait(self._every_s):
            now_s, turned_s = time.monotonic(), self._turned_s
            own_delay_s = now_s - looked_s - self._every_s
            looked_s = now_s
            if own_delay_s > self._late_s:
                self._tell(STARVED, own_delay_s, "the process was given no time to run")
            elif told_s != turned_s and now_s - turned_s > self._late_s + self._every_s:
                told_s = turned_s
                self._wait_for_turn(turned_s)
                looked_s = time.monotonic()

    def _wait_for_turn(self, turned_s: float) -> None:
        """Where the loop is, at once; and for how long it was there, once it is known."""
        where = self._where()
        logger.warning(
            "no answer goes on since %.1f s: the event loop is in\n%s",
            time.monotonic() - turned_s,
            where,
        )
        while self._turned_s == turned_s and not self._is_over.wait(self._every_s / 5):
            pass
        self._tell(BLOCKED, time.monotonic() - turned_s, "the event loop was held up")

    def _where(self) -> str:
        """The innermost calls, without what they were called with."""
        frame = sys._current_frames().get(self._watched)
        return "".join(traceback.format_stack(frame)[-MAX_FRAMES:]) if frame else "(it has ended)"

    def _tell(self, kind: str, seconds: float, what: str) -> None:
        logger.warning("no answer went on for %.1f s: %s", seconds, what)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_late, kind, seconds)
