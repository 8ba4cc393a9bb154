"""A step that has been given to the device and whose tokens are not yet known on the host."""

from __future__ import annotations

from dataclasses import dataclass

from .logprobs import RowLogprobs
from .request import TokenLogprob
from .sampler import NoToken, Sampled
from .scheduler import ScheduledRow

Drawn = tuple[int, TokenLogprob | None] | NoToken
"""What sampling gave one row: a token, with its log-probability where asked, or why it has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSize:
    """What the last step computed and how long it took; the raw material of measured rates."""

    num_tokens: int  # of all its rows
    is_decode: bool  # one token a row
    seconds: float


@dataclass(slots=True)
class LaunchedStep:
    """Not frozen for the reason that `RequestOutput` is not."""

    rows: list[ScheduledRow]
    began: float  # monotonic, seconds
    sampled: Sampled | None  # None: no row draws
    scores: list[tuple[ScheduledRow, RowLogprobs]]  # of the prompt tokens of rows that asked

    def drawn(self) -> list[Drawn]:
        """What each draw came to, once the device is done. RuntimeError when that failed."""
        if self.sampled is None:
            return []
        drawn: list[Drawn] = list(zip(*self.sampled.to_host(), strict=True))
        for i, reason in self.sampled.failed_rows().items():
            drawn[i] = reason
        return drawn

    def size(self, seconds: float) -> StepSize:
        """How much it computed, in how long."""
        counts = [row.num_tokens for row in self.rows]
        return StepSize(
            num_tokens=sum(counts),
            is_decode=counts.count(1) == len(counts),
            seconds=seconds,
        )
