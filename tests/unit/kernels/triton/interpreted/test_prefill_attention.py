"""Prefill attention equals float64 and its torch twin, over chunks, caches and other rows."""

from __future__ import annotations

import pytest
import torch

from polypath.kernels import paged_attention as twin
from polypath.kernels.store_kv import kv_rows
from polypath.kernels.triton.paged import PagedRows, Scores
from polypath.kernels.triton.prefill_attention import prefill_attention
from polypath.kernels.triton.tiles import Tile
from polypath.tests.unit.kernels.triton.interpreted.attending import (
    NAN,
    Paged,
    Shape,
    check,
    paged,
)

TILE = Tile(32, 32, 4, 1)
SMALL = Shape(num_heads=4, kv_heads=2, head_dim=32)


def attend(batch: Paged, scores: Scores, tile: Tile = TILE) -> torch.Tensor:
    out = torch.full(batch.q_TND.shape, NAN, dtype=batch.q_TND.dtype)
    prefill_attention(batch.q_TND, batch.kv_P2SKD, batch.rows, scores, out, tile=tile)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_prompts_and_chunks_over_a_cache(dtype: torch.dtype) -> None:
    shape = Shape(num_heads=3, kv_heads=1, head_dim=64, dtype=dtype)
    batch = paged(shape, [37, 2, 12], [37, 2, 90])
    check(attend(batch, Scores(64**-0.5)), batch.truth(Scores(64**-0.5)))


def test_the_torch_twin_agrees() -> None:
    batch = paged(SMALL, [21], [53])
    slots = batch.rows.page_table.long()[0, :4, None] * 16 + torch.arange(16)
    k_rows = kv_rows(slots.flatten()[:53], 16)
    mask = twin.causal_mask(32, 21, 53, 40, torch.float32)
    q = batch.q_TND.contiguous()
    wanted = twin.prefill_attention(q, batch.kv_P2SKD, k_rows, mask, 0.2)
    found = attend(batch, Scores(0.2, window=40))
    torch.testing.assert_close(found, wanted, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize(
    "scores",
    [Scores(0.3, window=1), Scores(0.3, window=45), Scores(1.0, soft_cap=2.0)],
    ids=str,
)
def test_windows_and_soft_caps(scores: Scores) -> None:
    batch = paged(SMALL, [40, 17], [130, 17])
    check(attend(batch, scores), batch.truth(scores))


@pytest.mark.parametrize("page_size", [5, 64], ids=str)
def test_pages_and_heads_of_other_sizes(page_size: int) -> None:
    shape = Shape(num_heads=5, kv_heads=1, head_dim=80, page_size=page_size)
    batch = paged(shape, [9, 11], [70, 11])
    check(attend(batch, Scores(0.1)), batch.truth(Scores(0.1)))


def test_rows_of_one_token_and_of_none_are_left_alone() -> None:
    batch = paged(SMALL, [1, 18, 0, 1, 3], [30, 18, 0, 3, 9])
    found, wanted = attend(batch, Scores(0.2)), batch.truth(Scores(0.2))
    mine = [*range(1, 19), *range(20, 23)]
    check(found[mine], wanted[mine])
    assert found[[0, 19]].isnan().all()


@pytest.mark.parametrize("window", [None, 33])
def test_a_tokens_bits_do_not_depend_on_neighbours(window: int | None) -> None:
    batch = paged(SMALL, [9, 40], [40, 70])
    batch.kv_P2SKD.nan_to_num_()
    scores = Scores(0.2, window=window)
    together = attend(batch, scores)
    table, lens = batch.rows.page_table[1:], batch.rows.kv_lens[1:]
    for new in (40, 23):  # and hardly on its chunk: numpy sums a row by where it lies in a matrix
        alone = PagedRows(table, torch.tensor([0, new], dtype=torch.int32), lens)
        found = attend(Paged(batch.q_TND[49 - new : 49], batch.kv_P2SKD, alone), scores)
        bound = 0.0 if new == 40 else 1e-6
        torch.testing.assert_close(found, together[49 - new : 49], rtol=bound, atol=bound)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [1, 5, 16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_many_shapes(head_dim: int, group: int, dtype: torch.dtype) -> None:
    shape = Shape(num_heads=group, kv_heads=1, head_dim=head_dim, page_size=16 * group, dtype=dtype)
    batch = paged(shape, [11, 5], [11, 100])
    tile = Tile(64, 64, 4, 1)
    for scores in (Scores(head_dim**-0.5), Scores(0.1, window=30, soft_cap=5.0)):
        check(attend(batch, scores, tile), batch.truth(scores))
