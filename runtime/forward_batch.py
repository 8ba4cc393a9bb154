"""One step as tensors. Data flow: Scheduler chooses `ScheduledRow`s -> `ForwardBatch.build` ->
attention `plan` -> model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .forward_mode import ForwardMode
from .scheduler import ScheduledRow


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
        positions = np.concatenate(
            [np.arange(s, s + n, dtype=np.int64) for s, n in zip(starts, counts, strict=True)]
        )
        page_table = _page_table(rows)
        row_of_token = np.repeat(np.arange(len(rows)), counts)
        pages = page_table[row_of_token, positions // page_size].astype(np.int64)
        query_starts = (0, *np.cumsum(counts).tolist())
        return cls(
            mode=_mode(counts),
            input_ids=torch.tensor(tokens, dtype=torch.int64, device=device),
            positions=torch.from_numpy(positions).to(device),
            slots=torch.from_numpy(pages * page_size + positions % page_size).to(device),
            page_table=torch.from_numpy(page_table).to(device),
            query_starts=query_starts,
            kv_lens=tuple(s + n for s, n in zip(starts, counts, strict=True)),
            logits_rows=torch.tensor(
                _logits_rows(rows, query_starts), dtype=torch.int64, device=device
            ),
            page_size=page_size,
        )


def _mode(counts: Sequence[int]) -> ForwardMode:
    decodes = sum(n == 1 for n in counts)
    if decodes == len(counts):
        return ForwardMode.DECODE
    return ForwardMode.MIXED if decodes else ForwardMode.PREFILL


def _page_table(rows: Sequence[ScheduledRow]) -> np.ndarray:
    table = np.zeros((len(rows), max(len(row.state.pages) for row in rows)), dtype=np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row.state.pages)] = row.state.pages
    return table


def _logits_rows(rows: Sequence[ScheduledRow], query_starts: Sequence[int]) -> list[int]:
    wanted: list[int] = []
    for row, start in zip(rows, query_starts, strict=False):
        wanted.extend(range(start, start + row.num_prompt_logits))
        if row.samples:
            wanted.append(start + row.num_tokens - 1)
    return wanted
