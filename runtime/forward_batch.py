"""One step as numbers and as tensors. Data flow: Scheduler chooses `ScheduledRow`s ->
`ForwardBatch.build` -> attention `plan` -> model.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from ..kernels.transfer import all_to_device
from .forward_mode import ForwardMode
from .kv.pages import SCRATCH_PAGE
from .scheduler import ScheduledRow

_SCRATCH = bytes([SCRATCH_PAGE])  # page 0 is made of bytes that are all 0


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTensors:
    """What kernels read of a step. T tokens, B rows (requests), R rows of logits."""

    input_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    slots: (
        torch.Tensor
    )  # int64 [T], page * page_size + offset: where each token's keys and values go
    page_table: torch.Tensor  # int32 [B, max_pages], padded with the scratch page
    logits_rows: torch.Tensor  # int64 [R], which of the T tokens need logits, in row order


@dataclass(kw_only=True, slots=True, eq=False)
class BatchNumbers:
    """The same on the host, of type code q; pages as int32, row by row. Neither it nor
    `ForwardBatch` is frozen, for the reason that `RequestOutput` is not.
    """

    input_ids: array[int]
    positions: array[int]
    slots: array[int]
    pages: list[array[int]]
    logits_rows: array[int]

    def tensors(self, device: torch.device) -> BatchTensors:
        """On a device, in one copy."""
        whole = map(_int64, (self.input_ids, self.positions, self.slots, self.logits_rows))
        found = all_to_device((*whole, _page_table(self.pages)), device)
        input_ids, positions, slots, logits_rows, page_table = found
        return BatchTensors(
            input_ids=input_ids,
            positions=positions,
            slots=slots,
            page_table=page_table,
            logits_rows=logits_rows,
        )


@dataclass(kw_only=True, slots=True, eq=False)
class ForwardBatch:
    """One forward pass. Its tensors are made when they are first asked for: a CPU graph copies the
    numbers, and each torch function that a step calls costs 10 to 30 us after a forward pass has
    emptied the caches.
    """

    mode: ForwardMode
    query_starts: tuple[int, ...]  # B + 1 offsets into T (host)
    kv_lens: tuple[int, ...]  # B lengths after this step, in tokens (host)
    num_logits: int  # R
    page_size: int
    device: torch.device
    numbers: BatchNumbers | None = None  # None: only the device knows them all
    made: BatchTensors | None = None

    @property
    def num_rows(self) -> int:
        """Requests in the batch."""
        return len(self.kv_lens)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return self.query_starts[-1]

    @property
    def tensors(self) -> BatchTensors:
        """All tensors."""
        if self.made is None:
            assert self.numbers is not None, "a batch has tensors or what they are made of"
            self.made = self.numbers.tensors(self.device)
        return self.made

    @property
    def input_ids(self) -> torch.Tensor:
        """int64 [T]."""
        return self.tensors.input_ids

    @property
    def positions(self) -> torch.Tensor:
        """int64 [T]."""
        return self.tensors.positions

    @property
    def slots(self) -> torch.Tensor:
        """int64 [T]."""
        return self.tensors.slots

    @property
    def page_table(self) -> torch.Tensor:
        """int32 [B, max_pages]."""
        return self.tensors.page_table

    @property
    def logits_rows(self) -> torch.Tensor:
        """int64 [R]."""
        return self.tensors.logits_rows

    @classmethod
    def build(
        cls, rows: Sequence[ScheduledRow], *, page_size: int, device: torch.device
    ) -> ForwardBatch:
        """Lay out the scheduled rows one after another."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        wanted: list[int] = []
        query_starts, kv_lens = [0], []
        for row in rows:
            state, count = row.state, row.num_tokens
            start, before = state.num_computed, len(tokens)
            if count == 1:
                tokens.append(state.token_ids[start])
                positions.append(start)
                page, offset = divmod(start, page_size)
                slots.append(state.pages[page] * page_size + offset)
            else:
                tokens += state.token_slice(count)
                positions += range(start, start + count)
                slots += _slots(state.pages, start, start + count, page_size)
            if not state.has_prompt_logprobs:
                wanted += range(before, before + row.num_prompt_logits)
            if row.samples:
                wanted.append(before + count - 1)
            query_starts.append(before + count)
            kv_lens.append(start + count)
        return cls(
            mode=_mode(query_starts),
            query_starts=tuple(query_starts),
            kv_lens=tuple(kv_lens),
            num_logits=len(wanted),
            page_size=page_size,
            device=device,
            numbers=BatchNumbers(
                input_ids=array("q", tokens),
                positions=array("q", positions),
                slots=array("q", slots),
                pages=[array("i", row.state.pages) for row in rows],
                logits_rows=array("q", wanted),
            ),
        )

    def with_logits_rows(self, wanted: Sequence[int]) -> ForwardBatch:
        """The same with logits of other tokens."""
        assert self.numbers is not None, "all numbers are on the host"
        numbers = replace(self.numbers, logits_rows=array("q", wanted))
        return replace(self, num_logits=len(wanted), numbers=numbers, made=None)

    def with_drawn(self, device_ids: torch.Tensor) -> ForwardBatch:
        """Put tokens int64 [B] that never left the device where the host wrote -1 - their index
        (RequestState.expect).
        """
        ids = self.input_ids
        drawn = torch.where(ids < 0, device_ids[(-1 - ids).clamp(min=0)], ids)
        return replace(self, numbers=None, made=replace(self.tensors, input_ids=drawn))


def _int64(values: array[int]) -> torch.Tensor:
    if not values:
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(values, dtype=torch.int64)


def _slots(pages: Sequence[int], start: int, stop: int, page_size: int) -> list[int]:
    """Where tokens start..stop of a request go."""
    slots: list[int] = []
    for index in range(start // page_size, (stop - 1) // page_size + 1):
        first = pages[index] * page_size
        slots += range(first, first + page_size)
    before = start % page_size
    return slots[before : before + stop - start]


def _mode(query_starts: Sequence[int]) -> ForwardMode:
    rows, tokens = len(query_starts) - 1, query_starts[-1]
    if rows == tokens:
        return ForwardMode.DECODE
    decodes = any(after - before == 1 for before, after in pairwise(query_starts))
    return ForwardMode.MIXED if decodes else ForwardMode.PREFILL


def _page_table(pages: Sequence[array[int]]) -> torch.Tensor:
    """int32 [B, max_pages]."""
    lines = [line.tobytes() for line in pages]
    width = max(map(len, lines))
    table = bytearray().join([line.ljust(width, _SCRATCH) for line in lines])
    return torch.frombuffer(table, dtype=torch.int32).view(len(lines), -1)
