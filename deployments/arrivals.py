"""How many tokens of work came lately: prompts, and the answers that they will likely have."""

from __future__ import annotations

from collections import deque

from .autoscaling_pools import Tokens

WINDOW_S = 30.0
BUCKET_S = 1.0


class Arrivals:
    """A sliding window over any clock that only goes forward."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._buckets: deque[tuple[float, float, float]] = deque()  # start, prompt, new

    def add(self, num_prompt: float, num_new: float, now_s: float) -> None:
        """An answer was asked for."""
        if self._buckets and now_s - self._buckets[-1][0] < BUCKET_S:
            start_s, prompt, new = self._buckets.pop()
        else:
            start_s, prompt, new = now_s, 0.0, 0.0
        self._buckets.append((start_s, prompt + num_prompt, new + num_new))

    def rate(self, now_s: float) -> Tokens:
        """Tokens a second over the window."""
        while self._buckets and now_s - self._buckets[0][0] >= self._window_s:
            self._buckets.popleft()
        return Tokens(
            prompt=sum(prompt for _, prompt, _ in self._buckets) / self._window_s,
            new=sum(new for _, _, new in self._buckets) / self._window_s,
        )
