"""One step as tensors. Data flow: Scheduler chooses `ScheduledRow`s -> `ForwardBatch.build` ->
attention `plan` -> model.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import add

import torch

from ..kernels.transfer import all_to_device
from .forward_mode import ForwardMode
from .kv.pages import SCRATCH_PAGE
from .scheduler import ScheduledRow

_SCRATCH = bytes([SCRATCH_PAGE])  # page 0 is made of bytes that are all 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBatch:
    """The tensors of one forward pass. T tokens, B rows (requests), R rows of logits."""

    mode: ForwardMode
    input_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    slots: (
        torch.Tensor
    )  # int64 [T], page * page_size + offset: where each token's keys and values go
    page_table: torch.Tensor  # int32 [B, max_pages], padded with the scratch page
    query_starts: tuple[int, ...]  # B + 1 offsets into T (host)
    kv_lens: tuple[int, ...]  # B lengths after this step, in tokens (host)
    logits_rows: torch.Tensor  # int64 [R], which of the T tokens need logits, in row order
    page_size: int

    @property
    def num_rows(self) -> int:
        """Requests in the batch."""
        return len(self.kv_lens)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return self.query_starts[-1]

    @classmethod
    def build(
        cls, rows: Sequence[ScheduledRow], *, page_size: int, device: torch.device
    ) -> ForwardBatch:
        """Lay out the scheduled rows one after another."""
        counts = [row.num_tokens for row in rows]
        starts = [row.state.num_computed for row in rows]
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for row, start, count in zip(rows, starts, counts, strict=True):
            tokens += row.state.token_slice(count)
            positions += range(start, start + count)
            slots += _slots(row.state.pages, start, start + count, page_size)
        query_starts = (0, *accumulate(counts))
        wanted = _int64(_logits_rows(rows, query_starts))
        values = (_int64(tokens), _int64(positions), _int64(slots), wanted, _page_table(rows))
        input_ids, at, into, logits_rows, page_table = all_to_device(values, device)
        return cls(
            mode=_mode(counts),
            input_ids=input_ids,
            positions=at,
            slots=into,
            page_table=page_table,
            query_starts=query_starts,
            kv_lens=tuple(map(add, starts, counts)),
            logits_rows=logits_rows,
            page_size=page_size,
        )

    def with_drawn(self, device_ids: torch.Tensor) -> ForwardBatch:
        """Put tokens int64 [B] that never left the device where the host wrote -1 - their index
        (RequestState.expect).
        """
        drawn = device_ids[(-1 - self.input_ids).clamp(min=0)]
        return replace(self, input_ids=torch.where(self.input_ids < 0, drawn, self.input_ids))


def _int64(values: list[int]) -> torch.Tensor:
    """By way of bytes, as cheap for one number as for thousands: each numpy or torch function that
    a step calls costs 10 to 30 us after a forward pass has emptied the caches.
    """
    if not values:
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(array("q", values), dtype=torch.int64)


def _slots(pages: Sequence[int], start: int, stop: int, page_size: int) -> list[int]:
    """Where tokens start..stop of a request go."""
    if stop == start + 1:
        return [pages[start // page_size] * page_size + start % page_size]
    slots: list[int] = []
    for index in range(start // page_size, (stop - 1) // page_size + 1):
        first = pages[index] * page_size
        slots += range(first, first + page_size)
    before = start % page_size
    return slots[before : before + stop - start]


def _mode(counts: Sequence[int]) -> ForwardMode:
    decodes = counts.count(1)
    if decodes == len(counts):
        return ForwardMode.DECODE
    return ForwardMode.MIXED if decodes else ForwardMode.PREFILL


def _page_table(rows: Sequence[ScheduledRow]) -> torch.Tensor:
    """int32 [B, max_pages]."""
    lines = [array("i", row.state.pages).tobytes() for row in rows]
    width = max(map(len, lines))
    table = bytearray().join([line.ljust(width, _SCRATCH) for line in lines])
    return torch.frombuffer(table, dtype=torch.int32).view(len(rows), -1)


def _logits_rows(rows: Sequence[ScheduledRow], query_starts: Sequence[int]) -> list[int]:
    wanted: list[int] = []
    for row, start in zip(rows, query_starts, strict=False):
        wanted.extend(range(start, start + row.num_prompt_logits))
        if row.samples:
            wanted.append(start + row.num_tokens - 1)
    return wanted
