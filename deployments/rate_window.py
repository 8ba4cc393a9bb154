"""What was spent during the last minute, in slots of one second of a monotonic clock.

The library `limits` was looked at (5.8): it counts by the wall clock, which may be set; takes
amounts apart into single entries, which a token rate cannot afford; and gives nothing back, which
settling a reservation needs.
"""

from __future__ import annotations

import math

WINDOW_S = 60


class RateWindow:
    """Amounts by the second they were spent in.

    A slot counts until all of it is older than the window, so no 60 s ever hold more than what was
    allowed.
    """

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}  # second -> amount, in order of time

    def spent(self, now_s: float) -> int:
        """The sum over the window."""
        self._forget(now_s)
        return sum(self._slots.values())

    def add(self, now_s: float, amount: int) -> int:
        """Spend; the slot it went into, for `give_back`."""
        slot = math.floor(now_s)
        self._slots[slot] = self._slots.get(slot, 0) + amount
        return slot

    def give_back(self, slot: int, amount: int) -> None:
        """Take an amount out again; when its slot is forgotten, so is the amount."""
        if slot in self._slots:
            self._slots[slot] = max(0, self._slots[slot] - amount)

    def wait_s(self, now_s: float, amount: int, limit: int) -> float:
        """Seconds until `amount` fits under `limit` if nothing else is spent or given back."""
        over = self.spent(now_s) + amount - limit
        for slot, spent in self._slots.items():
            if over <= 0:
                break
            over -= spent
            if over <= 0:
                return slot + 1 + WINDOW_S - now_s
        return 0.0 if over <= 0 else float(WINDOW_S)

    def reset_s(self, now_s: float) -> float:
        """Seconds until the window is empty if nothing else is spent."""
        self._forget(now_s)
        newest = max((slot for slot, spent in self._slots.items() if spent), default=None)
        return 0.0 if newest is None else newest + 1 + WINDOW_S - now_s

    def _forget(self, now_s: float) -> None:
        old = [slot for slot in self._slots if slot + 1 + WINDOW_S <= now_s]
        for slot in old:
            del self._slots[slot]
