"""The tensors that a graph reads: allocated once for a bucket, filled anew for each batch."""

from __future__ import annotations

from itertools import pairwise

import torch

from ..forward_batch import ForwardBatch
from ..forward_mode import ForwardMode
from ..graphs.mechanism import ReplayError

SCRATCH_PAGE = 0
"""Holds no request's keys: what padding writes and reads."""


class StaticBatch:
    """A `ForwardBatch` of `tokens` tokens at fixed addresses, at most `rows` requests.

    Padding is one-token requests whose only page is the scratch page.
    """

    def __init__(
        self, *, tokens: int, rows: int, max_pages: int, page_size: int, device: torch.device
    ) -> None:
        self.tokens = tokens
        self.rows = rows
        self._input_ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._slots = torch.full((tokens,), SCRATCH_PAGE * page_size, device=device)
        self._page_table = torch.full(
            (rows, max_pages), SCRATCH_PAGE, dtype=torch.int32, device=device
        )
        self._page_size = page_size
        self._all = torch.arange(tokens, device=device)
        self._tokens_filled = 0
        self._rows_filled = 0

    def batch(self, mode: ForwardMode) -> ForwardBatch:
        """What a capture runs on: every row at its shortest, all of them padding."""
        starts = (*range(self.rows), self.tokens)
        lens = tuple(b - a for a, b in pairwise(starts))
        return ForwardBatch(
            mode=mode,
            input_ids=self._input_ids,
            positions=self._positions,
            slots=self._slots,
            page_table=self._page_table,
            query_starts=starts,
            kv_lens=lens,
            logits_rows=self._all,
            page_size=self._page_size,
        )

    def fill(self, batch: ForwardBatch) -> None:
        """Copy a batch in; what an earlier, larger one left behind it becomes padding again."""
        self.fill_tokens(batch)
        rows, width = batch.page_table.shape
        self._page_table[:rows, :width] = batch.page_table
        if rows < self._rows_filled:
            self._page_table[rows : self._rows_filled] = SCRATCH_PAGE
        self._rows_filled = rows

    def fill_tokens(self, batch: ForwardBatch) -> None:
        """Copy in what belongs to tokens and not to requests. Raises ReplayError."""
        tokens, last = batch.num_tokens, self._tokens_filled
        if tokens > self.tokens:
            raise ReplayError(f"{tokens} tokens were given to a graph of {self.tokens}")
        self._input_ids[:tokens] = batch.input_ids
        self._positions[:tokens] = batch.positions
        self._slots[:tokens] = batch.slots
        if tokens < last:
            self._input_ids[tokens:last] = 0
            self._positions[tokens:last] = 0
            self._slots[tokens:last] = SCRATCH_PAGE * self._page_size
        self._tokens_filled = tokens

    def token_inputs(self) -> tuple[torch.Tensor, ...]:
        """Those tensors, whose addresses a graph holds."""
        return self._input_ids, self._positions, self._slots

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """All tensors whose addresses a graph holds."""
        return *self.token_inputs(), self._all, self._page_table

    def padding(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots of the tokens after the batch, and pages of the rows after it."""
        return self._slots[self._tokens_filled :], self._page_table[self._rows_filled :]
