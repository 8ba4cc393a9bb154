"""One step as tensors. Data flow: Scheduler chooses `ScheduledRow`s -> `ForwardBatch.build` ->
attention `plan` -> model.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add

import numpy as np
import torch

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
        tokens = [t for row in rows for t in row.state.token_slice(row.num_tokens)]
        query_starts = (0, *accumulate(counts))
        row_of_token = np.repeat(np.arange(len(rows)), counts)
        before_row = np.subtract(starts, query_starts[:-1])  # position less place in the batch
        positions = np.arange(len(tokens)) + before_row[row_of_token]
        page_table = _page_table(rows)
        pages = page_table[row_of_token, positions // page_size].astype(np.int64)
        return cls(
            mode=_mode(counts),
            input_ids=torch.tensor(tokens, dtype=torch.int64, device=device),
            positions=torch.from_numpy(positions).to(device),
            slots=torch.from_numpy(pages * page_size + positions % page_size).to(device),
            page_table=torch.from_numpy(page_table).to(device),
            query_starts=query_starts,
            kv_lens=tuple(map(add, starts, counts)),
            logits_rows=torch.tensor(
                _logits_rows(rows, query_starts), dtype=torch.int64, device=device
            ),
            page_size=page_size,
        )


def _mode(counts: Sequence[int]) -> ForwardMode:
    decodes = counts.count(1)
    if decodes == len(counts):
        return ForwardMode.DECODE
    return ForwardMode.MIXED if decodes else ForwardMode.PREFILL


def _page_table(rows: Sequence[ScheduledRow]) -> np.ndarray:
    """By bytes: numpy takes a list of numbers in several times slower than `array` does."""
    lines = [array("i", row.state.pages).tobytes() for row in rows]
    width = max(map(len, lines))
    table = bytearray().join(line.ljust(width, _SCRATCH) for line in lines)
    return np.frombuffer(table, dtype=np.int32).reshape(len(rows), -1)


def _logits_rows(rows: Sequence[ScheduledRow], query_starts: Sequence[int]) -> list[int]:
    wanted: list[int] = []
    for row, start in zip(rows, query_starts, strict=False):
        wanted.extend(range(start, start + row.num_prompt_logits))
        if row.samples:
            wanted.append(start + row.num_tokens - 1)
    return wanted
