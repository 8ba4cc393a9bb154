"""How fast an engine is: prompt tokens a second, and seconds of a decode step by batch size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

WEIGHT = 0.1  # of one live step in a moving average; a calibrated value fades after some 20 steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """Measured rates; empty where nothing was measured."""

    prefill_tokens_s: float = 0.0  # 0.0: unknown
    step_s: tuple[tuple[int, float], ...] = ()  # (rows, seconds of one decode step), rising rows

    def decode_step_s(self, rows: int) -> float:
        """Seconds of a decode step of `rows`, between and beyond what was measured; 0.0 unknown.

        Beyond the largest batch it goes on as from one row to there; below the smallest it stays.
        """
        points = self.step_s
        if not points:
            return 0.0
        if rows <= points[0][0]:
            return points[0][1]
        if len(points) == 1:  # as if each row cost the same: too dark rather than too bright
            return points[0][1] * rows / points[0][0]
        for low, high in pairwise(points):
            if rows <= high[0]:
                return _on_line(low, high, rows)
        return max(points[-1][1], _on_line(points[0], points[-1], rows))

    def decode_tokens_s(self, rows: int) -> float:
        """Tokens a second of all `rows` together; 0.0 unknown."""
        seconds = self.decode_step_s(rows)
        return rows / seconds if seconds else 0.0

    def to_json(self) -> dict[str, Any]:  # JSON
        """Plain values, for a worker's description and stats."""
        return {
            "prefill_tokens_s": round(self.prefill_tokens_s, 3),
            "step_s": [[rows, round(seconds, 7)] for rows, seconds in self.step_s],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> Speeds:  # JSON
        """Inverse of `to_json`; None is: nothing measured."""
        if not data:
            return cls()
        points = sorted((int(rows), float(seconds)) for rows, seconds in data["step_s"])
        return cls(prefill_tokens_s=float(data["prefill_tokens_s"]), step_s=tuple(points))


def _on_line(low: tuple[int, float], high: tuple[int, float], rows: int) -> float:
    share = (rows - low[0]) / (high[0] - low[0])
    return low[1] + share * (high[1] - low[1])


class SpeedMeter:
    """Keeps speeds true from live steps: a moving average for each range of batch sizes.

    Ranges end at powers of two (1, 2, 4, 8 ...), so that sizes in use stay apart and few.
    """

    def __init__(self, first: Speeds | None = None) -> None:
        first = first or Speeds()
        self._prefill_s = 1.0 / first.prefill_tokens_s if first.prefill_tokens_s else 0.0
        self._steps: dict[int, tuple[float, float]] = {}  # range -> (rows, seconds)
        for rows, seconds in first.step_s:
            self._steps[_range(rows)] = (float(rows), seconds)

    def observe(self, num_tokens: int, is_decode: bool, seconds: float) -> None:
        """A step computed so many tokens; in a decode step that is one for each row."""
        if num_tokens < 1 or seconds <= 0.0:
            return
        if not is_decode:
            self._prefill_s = _moved(self._prefill_s, seconds / num_tokens)
            return
        key = _range(num_tokens)
        rows, step_s = self._steps.get(key, (float(num_tokens), seconds))
        self._steps[key] = (_moved(rows, float(num_tokens)), _moved(step_s, seconds))

    def speeds(self) -> Speeds:
        """What is known now; may be read from another thread."""
        return Speeds(
            prefill_tokens_s=1.0 / self._prefill_s if self._prefill_s else 0.0,
            step_s=_rising((round(rows), s) for rows, s in list(self._steps.values())),
        )


def _range(rows: int) -> int:
    return (rows - 1).bit_length()


def _moved(average: float, value: float) -> float:
    return average + WEIGHT * (value - average) if average else value


def _rising(points: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """By rows, no size twice; a larger batch never takes less time than a smaller one."""
    found: dict[int, float] = {}
    longest = -math.inf
    for rows, seconds in sorted(points):
        longest = max(longest, seconds)
        found[rows] = longest
    return tuple(found.items())
