"""Lays tensors of known lifetime out in one block of memory, so that those that never live together
share bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64


@dataclass(slots=True)
class Span:
    """One tensor: its bytes, and the first and last call that touch it (inclusive)."""

    num_bytes: int
    first: int
    last: int

    def meets(self, other: Span) -> bool:
        """Whether both live at the same time."""
        return self.first <= other.last and other.first <= self.last


def lay_out(spans: Sequence[Span]) -> tuple[list[int], int]:
    """Offset of each span, and the bytes of all: largest first, each at the lowest place free of
    what lives with it.
    """
    offsets = [0] * len(spans)
    placed: list[int] = []
    for i in sorted(range(len(spans)), key=lambda i: -spans[i].num_bytes):
        taken = sorted(
            (offsets[j], offsets[j] + spans[j].num_bytes)
            for j in placed
            if spans[j].meets(spans[i])
        )
        offset = 0
        for start, stop in taken:
            if offset + spans[i].num_bytes <= start:
                break
            offset = max(offset, _aligned(stop))
        offsets[i] = offset
        placed.append(i)
    ends = [o + s.num_bytes for o, s in zip(offsets, spans, strict=True)]
    return offsets, _aligned(max(ends, default=0))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
