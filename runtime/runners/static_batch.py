"""The tensors that a graph reads: allocated once for a bucket, filled anew for each batch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise

import torch

from ...kernels.transfer import host_view
from ..forward_batch import BatchNumbers, BatchTensors, ForwardBatch
from ..forward_mode import ForwardMode
from ..graphs.mechanism import ReplayError

SCRATCH_PAGE = 0
"""Holds no request's keys: what padding writes and reads."""


class StaticBatch:
    """A `ForwardBatch` of `tokens` tokens at fixed addresses, at most `rows` requests.

    Padding is one-token requests whose only page is the scratch page. `by_memory`: numbers of the
    host are copied without torch, where the graph's mechanism allows that.
    """

    def __init__(
        self,
        *,
        tokens: int,
        rows: int,
        max_pages: int,
        page_size: int,
        device: torch.device,
        by_memory: bool = False,
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
        self._device = device
        self._max_pages = max_pages
        self._tokens_filled = 0
        self._rows_filled = 0
        self._by_memory = by_memory
        if by_memory:
            inputs = (self._input_ids, self._positions, self._slots)
            self._token_memory = tuple(host_view(tensor) for tensor in inputs)
            self._table_memory = host_view(self._page_table)

    def batch(self, mode: ForwardMode) -> ForwardBatch:
        """What a capture runs on: every row at its shortest, all of them padding."""
        starts = (*range(self.rows), self.tokens)
        lens = tuple(b - a for a, b in pairwise(starts))
        return ForwardBatch(
            mode=mode,
            query_starts=starts,
            kv_lens=lens,
            num_logits=self.tokens,
            page_size=self._page_size,
            device=self._device,
            made=BatchTensors(
                input_ids=self._input_ids,
                positions=self._positions,
                slots=self._slots,
                page_table=self._page_table,
                logits_rows=self._all,
            ),
        )

    def fill(self, batch: ForwardBatch) -> None:
        """Copy a batch in; what an earlier, larger one left behind it becomes padding again."""
        self.fill_tokens(batch)
        rows, last = batch.num_rows, self._rows_filled
        if self._by_memory and batch.numbers is not None:
            self._copy_pages(batch.numbers.pages, last)
        else:
            self._page_table[:rows, : batch.page_table.shape[1]] = batch.page_table
            if rows < last:
                self._page_table[rows:last] = SCRATCH_PAGE
        self._rows_filled = rows

    def fill_tokens(self, batch: ForwardBatch) -> None:
        """Copy in what belongs to tokens and not to requests. Raises ReplayError."""
        tokens, last = batch.num_tokens, self._tokens_filled
        if tokens > self.tokens:
            raise ReplayError(f"{tokens} tokens were given to a graph of {self.tokens}")
        if self._by_memory and batch.numbers is not None:
            self._copy_tokens(batch.numbers, tokens, last)
        else:
            self._input_ids[:tokens] = batch.input_ids
            self._positions[:tokens] = batch.positions
            self._slots[:tokens] = batch.slots
            if tokens < last:
                self._input_ids[tokens:last] = 0
                self._positions[tokens:last] = 0
                self._slots[tokens:last] = SCRATCH_PAGE * self._page_size
        self._tokens_filled = tokens

    def _copy_tokens(self, numbers: BatchNumbers, tokens: int, last: int) -> None:
        """The same by way of memory and without torch (see `ForwardBatch`)."""
        input_ids, positions, slots = self._token_memory
        input_ids[:tokens] = numbers.input_ids
        positions[:tokens] = numbers.positions
        slots[:tokens] = numbers.slots
        if tokens < last:
            zeros = array("q", [0]) * (last - tokens)
            input_ids[tokens:last] = positions[tokens:last] = zeros
            slots[tokens:last] = array("q", [SCRATCH_PAGE * self._page_size]) * (last - tokens)

    def _copy_pages(self, pages: Sequence[array[int]], last: int) -> None:
        memory, width = self._table_memory, self._max_pages
        first = 0
        for row in pages:
            memory[first : first + len(row)] = row
            first += width
        if len(pages) < last:
            scratch = array("i", [SCRATCH_PAGE]) * ((last - len(pages)) * width)
            memory[first : last * width] = scratch

    def token_inputs(self) -> tuple[torch.Tensor, ...]:
        """Those tensors, whose addresses a graph holds."""
        return self._input_ids, self._positions, self._slots

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """All tensors whose addresses a graph holds."""
        return *self.token_inputs(), self._all, self._page_table

    def padding(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots of the tokens after the batch, and pages of the rows after it."""
        return self._slots[self._tokens_filled :], self._page_table[self._rows_filled :]
