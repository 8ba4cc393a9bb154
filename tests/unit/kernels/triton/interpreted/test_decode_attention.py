"""Decode attention equals float64 and its torch twin, whatever lies around a row."""

from __future__ import annotations

import pytest
import torch

from polypath.kernels import paged_attention as twin
from polypath.kernels.store_kv import kv_rows
from polypath.kernels.triton.decode_attention import MOST_SPLITS, SPLIT, decode_attention
from polypath.kernels.triton.paged import PagedRows, Scores
from polypath.kernels.triton.tiles import Tile
from polypath.tests.unit.kernels.triton.interpreted.attending import (
    NAN,
    Paged,
    Shape,
    check,
    paged,
)

WIDE = Tile(16, SPLIT, 4, 1)  # fewer steps for the interpreter, whose time is by the step
SMALL = Shape(num_heads=4, kv_heads=2, head_dim=32)


def attend(batch: Paged, scores: Scores, tile: Tile = WIDE, **options: int) -> torch.Tensor:
    out = torch.full(batch.q_TND.shape, NAN, dtype=batch.q_TND.dtype)
    decode_attention(batch.q_TND, batch.kv_P2SKD, batch.rows, scores, out, tile=tile, **options)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rows_of_one_token_to_several_splits(dtype: torch.dtype) -> None:
    shape = Shape(num_heads=6, kv_heads=2, head_dim=64, dtype=dtype)
    batch = paged(shape, [1, 1, 1], [1, SPLIT + 1, 40])
    scores = Scores(64**-0.5)
    check(attend(batch, scores), batch.truth(scores))


def test_the_torch_twin_agrees() -> None:
    batch = paged(SMALL, [1, 1], [37, 37])
    slots = batch.rows.page_table.long()[:, :3, None] * 16 + torch.arange(16)
    k_rows = kv_rows(slots.flatten(1)[:, :37], 16)
    wanted = twin.decode_attention(
        batch.q_TND.contiguous(), batch.kv_P2SKD, k_rows, torch.zeros(2, 37), 0.2
    )
    torch.testing.assert_close(attend(batch, Scores(0.2)), wanted, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize(
    "scores",
    [Scores(0.3, window=20), Scores(0.3, window=300), Scores(1.0, soft_cap=2.0)],
    ids=str,
)
def test_windows_and_soft_caps(scores: Scores) -> None:
    batch = paged(SMALL, [1, 1], [2 * SPLIT + 9, 5])
    check(attend(batch, scores), batch.truth(scores))


@pytest.mark.parametrize("page_size", [5, 64], ids=str)
def test_tiles_smaller_than_splits_and_pages_of_other_sizes(page_size: int) -> None:
    shape = Shape(num_heads=3, kv_heads=1, head_dim=80, page_size=page_size)
    batch = paged(shape, [1, 1], [150, 64])
    scores = Scores(0.1, window=70)
    check(attend(batch, scores, Tile(16, 32, 4, 1)), batch.truth(scores))


def test_rows_without_keys_give_zeros_and_rows_of_more_tokens_are_left_alone() -> None:
    batch = paged(SMALL, [1, 2, 0, 1], [30, 7, 0, 3])
    starts = batch.rows.query_starts
    empty = PagedRows(
        batch.rows.page_table, starts, batch.rows.kv_lens * torch.tensor([1, 1, 1, 0])
    )
    batch = Paged(batch.q_TND, batch.kv_P2SKD, PagedRows(*_int32(empty)))
    found = attend(batch, Scores(0.2))
    check(found[0], batch.truth(Scores(0.2))[0])
    assert found[1:3].isnan().all() and (found[3] == 0).all()


def _int32(rows: PagedRows) -> tuple[torch.Tensor, ...]:
    return rows.page_table, rows.query_starts, rows.kv_lens.to(torch.int32)


def test_a_rows_bits_do_not_depend_on_neighbours_programs_or_the_tables_width() -> None:
    lens = [2 * SPLIT + 100, 3, SPLIT]
    batch = paged(SMALL, [1, 1, 1], lens)
    batch.kv_P2SKD.nan_to_num_()
    together = attend(batch, Scores(0.2))
    for row in range(3):
        pages = -(-lens[row] // 16)
        alone = PagedRows(
            batch.rows.page_table[row : row + 1, :pages],
            batch.rows.query_starts[:2],
            batch.rows.kv_lens[row : row + 1],
        )
        q = batch.q_TND[row : row + 1]
        found = attend(Paged(q, batch.kv_P2SKD, alone), Scores(0.2), num_programs=1)
        assert torch.equal(found[0], together[row])


def test_a_neighbours_nan_stays_with_it() -> None:
    batch = paged(SMALL, [1, 1], [20, 20])
    batch.kv_P2SKD[batch.rows.page_table[0, 0].long()] = NAN
    found = attend(batch, Scores(0.2))
    assert found[0].isnan().all() and found[1].isfinite().all()


@pytest.mark.slow
def test_a_row_longer_than_all_splits_has_larger_ones() -> None:
    batch = paged(
        Shape(num_heads=1, kv_heads=1, head_dim=16, page_size=256), [1], [SPLIT * MOST_SPLITS + 77]
    )
    check(attend(batch, Scores(0.25)), batch.truth(Scores(0.25)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [1, 5, 16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_many_shapes(head_dim: int, group: int, dtype: torch.dtype) -> None:
    shape = Shape(num_heads=group, kv_heads=1, head_dim=head_dim, page_size=16 * group, dtype=dtype)
    batch = paged(shape, [1, 1], [97, SPLIT + 2])
    for scores in (Scores(head_dim**-0.5), Scores(0.1, window=100, soft_cap=5.0)):
        check(attend(batch, scores), batch.truth(scores))
