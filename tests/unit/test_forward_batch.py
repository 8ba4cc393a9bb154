"""A batch's tensors against what they mean, token by token."""

from __future__ import annotations

from random import Random

import pytest
import torch

from polypath.runtime.forward_batch import ForwardBatch
from polypath.runtime.forward_mode import ForwardMode
from polypath.runtime.request import Request, SamplingParams
from polypath.runtime.scheduler import RequestState, ScheduledRow

_PAGE = 4
_LENGTHS = {  # (tokens, of which computed before, of which computed now) of each row
    ForwardMode.DECODE: [(9, 8, 1), (1, 0, 1), (300, 299, 1)],
    ForwardMode.PREFILL: [(9, 0, 9), (30, 8, 5)],
    ForwardMode.MIXED: [(9, 8, 1), (30, 8, 22), (5, 4, 1), (9, 4, 2)],
}


def _rows(mode: ForwardMode, rng: Random) -> list[ScheduledRow]:
    rows = []
    for i, (length, computed, now) in enumerate(_LENGTHS[mode]):
        ids = tuple(rng.randrange(1000) for _ in range(length))
        state = RequestState(Request(id=str(i), prompt_ids=ids), i, 1000)
        state.num_computed = computed
        state.pages = [rng.randrange(1, 70_000) for _ in range(-(-(computed + now) // _PAGE))]
        rows.append(ScheduledRow(state, now))
    return rows


@pytest.mark.parametrize("mode", list(_LENGTHS))
def test_every_token_is_where_its_request_has_it(mode: ForwardMode) -> None:
    rows = _rows(mode, Random(0))
    batch = ForwardBatch.build(rows, page_size=_PAGE, device=torch.device("cpu"))
    tokens = [(r.state, r.state.num_computed + i) for r in rows for i in range(r.num_tokens)]
    assert batch.mode is mode
    assert batch.input_ids.tolist() == [state.token_ids[at] for state, at in tokens]
    assert batch.positions.tolist() == [at for _, at in tokens]
    assert batch.slots.tolist() == [s.pages[at // _PAGE] * _PAGE + at % _PAGE for s, at in tokens]
    assert batch.kv_lens == tuple(r.state.num_computed + r.num_tokens for r in rows)
    assert batch.query_starts[0] == 0
    assert [b - a for a, b in zip(batch.query_starts, batch.query_starts[1:], strict=False)] == [
        r.num_tokens for r in rows
    ]


@pytest.mark.parametrize("mode", list(_LENGTHS))
def test_the_page_table_is_padded_with_the_scratch_page(mode: ForwardMode) -> None:
    rows = _rows(mode, Random(1))
    batch = ForwardBatch.build(rows, page_size=_PAGE, device=torch.device("cpu"))
    width = max(len(row.state.pages) for row in rows)
    assert batch.page_table.tolist() == [
        row.state.pages + [0] * (width - len(row.state.pages)) for row in rows
    ]


def test_types_are_those_that_kernels_and_graphs_read() -> None:
    rows = _rows(ForwardMode.MIXED, Random(2))
    batch = ForwardBatch.build(rows, page_size=_PAGE, device=torch.device("cpu"))
    whole = (batch.input_ids, batch.positions, batch.slots, batch.logits_rows)
    assert {tensor.dtype for tensor in whole} == {torch.int64}
    assert batch.page_table.dtype == torch.int32
    assert all(tensor.is_contiguous() for tensor in (*whole, batch.page_table))
    assert all(type(n) is int for n in (*batch.query_starts, *batch.kv_lens))


def test_logits_are_wanted_of_last_tokens_and_of_scored_prompts() -> None:
    rows = _rows(ForwardMode.MIXED, Random(3))
    scored = Request(
        id="scored", prompt_ids=(1, 2, 3, 4), sampling=SamplingParams(prompt_logprobs=0)
    )
    state = RequestState(scored, 9, 1000)
    state.pages = [7]
    batch = ForwardBatch.build(
        [*rows, ScheduledRow(state, 4)], page_size=_PAGE, device=torch.device("cpu")
    )
    assert batch.logits_rows.tolist() == [0, 22, 23, 26, 27, 28, 29]
