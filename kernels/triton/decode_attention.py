"""Attention of rows with one new token: each row's keys are split, and the splits are merged in
order. Twin: kernels/paged_attention.py.

Where a row is split follows from its own length alone, so neither its neighbours nor the number of
programs change a bit of it. Lengths are read when the kernel runs: a graph may hold it. Shapes as
in paged.py; Z splits.
"""

from __future__ import annotations

import torch
import triton.language as tl

from .dialect import ceil_div, jit
from .paged import PagedHeads, PagedRows, Scores, check_layout, key_rows, raw_scores, soften
from .tiles import Tile, capability_of, decode_tile

SPLIT = 256  # tokens, or a multiple of it in a row of more than SPLIT * MOST_SPLITS
MOST_SPLITS = 64
PROGRAMS = 2048  # are enough for any card; beyond, one program takes several splits of a row
CHUNK = 16  # splits merged at a time


@jit
def _splits(
    kv_len, window: tl.constexpr, width: tl.constexpr, split: tl.constexpr, most: tl.constexpr
):
    """First token that is seen (or just before it), tokens of a split, and splits of a row."""
    start = kv_len * 0
    if window:
        start = tl.maximum(kv_len - window, 0) // width * width
    seen = kv_len - start
    size = tl.maximum((seen + split * most - 1) // (split * most), 1) * split
    return start, size, (seen + size - 1) // size


@jit(do_not_specialize=["page_stride", "num_slots"])
def _attend_splits(
    q_ptr,
    kv_ptr,
    page_table_ptr,
    query_starts_ptr,
    kv_lens_ptr,
    acc_ptr,
    sums_ptr,
    q_stride,
    page_stride,
    num_slots,
    inner,
    sharpness,
    num_heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    page_size: tl.constexpr,
    window: tl.constexpr,
    has_cap: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    split: tl.constexpr,
    most: tl.constexpr,
):
    row, kv_head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_starts_ptr + row)
    if tl.load(query_starts_ptr + row + 1) - token != 1:
        return
    kv_len = tl.load(kv_lens_ptr + row)
    start, size, count = _splits(kv_len, window, width, split, most)
    group: tl.constexpr = num_heads // kv_heads
    member, column = tl.arange(0, height), tl.arange(0, padded_dim)
    head = kv_head * group + member
    in_group, in_head = member < group, (column < head_dim)[None, :]
    q_place = token.to(tl.int64) * q_stride + head[:, None] * head_dim + column[None, :]
    q = tl.load(q_ptr + q_place, mask=in_group[:, None] & in_head, other=0.0)
    pages_ptr = page_table_ptr + row.to(tl.int64) * page_stride
    for index in range(tl.program_id(2), count, tl.num_programs(2)):
        best = tl.full([height], float("-inf"), dtype=tl.float32)
        total = tl.zeros([height], dtype=tl.float32)
        acc = tl.zeros([height, padded_dim], dtype=tl.float32)
        low = start + index * size
        for first in range(low, tl.minimum(low + size, kv_len), width):
            tokens = first + tl.arange(0, width)
            inside = tokens < kv_len
            key_row = key_rows(pages_ptr, first, tokens, inside, page_size, width)
            place = (key_row * kv_heads + kv_head)[:, None] * head_dim + column[None, :]
            mask = inside[:, None] & in_head
            k = tl.load(kv_ptr + place, mask=mask, other=0.0)
            v = tl.load(kv_ptr + place + page_size * kv_heads * head_dim, mask=mask, other=0.0)
            raw = raw_scores(q, k.to(q.dtype), inner, has_cap, height, width)
            if window:
                inside = inside & (tokens >= kv_len - window)
            raw = tl.where(inside[None, :], raw, float("-inf"))
            best, total, acc = soften(raw, v.to(q.dtype), best, total, acc, sharpness)
        slot = (row.to(tl.int64) * num_heads + head) * num_slots + index
        tl.store(sums_ptr + slot * 2, best, mask=in_group)
        tl.store(sums_ptr + slot * 2 + 1, total, mask=in_group)
        acc_place = slot[:, None] * head_dim + column[None, :]
        tl.store(acc_ptr + acc_place, acc, mask=in_group[:, None] & in_head)


@jit(do_not_specialize=["num_slots"])
def _merge_splits(
    acc_ptr,
    sums_ptr,
    query_starts_ptr,
    kv_lens_ptr,
    out_ptr,
    num_slots,
    sharpness,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    window: tl.constexpr,
    width: tl.constexpr,
    split: tl.constexpr,
    most: tl.constexpr,
    chunk: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_starts_ptr + row)
    if tl.load(query_starts_ptr + row + 1) - token != 1:
        return
    _, _, count = _splits(tl.load(kv_lens_ptr + row), window, width, split, most)
    column = tl.arange(0, padded_dim)
    in_head = column < head_dim
    best = tl.full([1], float("-inf"), dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    acc = tl.zeros([padded_dim], dtype=tl.float32)
    for first in range(0, count, chunk):
        index = first + tl.arange(0, chunk)
        live = index < count
        slot = (row.to(tl.int64) * num_heads + head) * num_slots + index
        bests = tl.load(sums_ptr + slot * 2, mask=live, other=float("-inf"))
        totals = tl.load(sums_ptr + slot * 2 + 1, mask=live, other=0.0)
        place = slot[:, None] * head_dim + column[None, :]
        accs = tl.load(acc_ptr + place, mask=live[:, None] & in_head[None, :], other=0.0)
        new_best = tl.maximum(best, tl.max(bests, axis=0))
        kept = tl.exp2((best - new_best) * sharpness)
        weights = tl.exp2((bests - new_best) * sharpness)
        total = total * kept + tl.sum(totals * weights, axis=0)
        acc = acc * kept + tl.sum(accs * weights[:, None], axis=0)
        best = new_best
    out = acc / tl.where(count == 0, 1.0, total)  # zeros for a row that sees nothing
    out_place = (token.to(tl.int64) * num_heads + head) * head_dim + column
    tl.store(out_ptr + out_place, out.to(out_ptr.dtype.element_ty), mask=in_head)


def decode_attention(
    q_TND: torch.Tensor,
    kv_P2SKD: torch.Tensor,
    rows: PagedRows,
    scores: Scores,
    out_TND: torch.Tensor,
    *,
    tile: Tile | None = None,
    num_programs: int = PROGRAMS,
) -> None:
    """Write the output of every row that has one new token; other rows' tokens stay as they are.
    The new keys are already stored. Tokens of `q_TND` may be strided, `out_TND` is contiguous.
    """
    check_layout(q_TND, kv_P2SKD, rows)
    heads = PagedHeads.of(q_TND, kv_P2SKD)
    if tile is None:
        card = capability_of(q_TND.device)
        tile = decode_tile(heads.group_size, heads.padded_dim, q_TND.element_size(), card)
    most_tokens = rows.page_table.shape[1] * heads.page_size
    num_slots = min(MOST_SPLITS, ceil_div(most_tokens, SPLIT))
    partial = {"dtype": torch.float32, "device": q_TND.device}
    shape = (rows.num_rows, heads.num_heads, num_slots)
    acc_BNZD = torch.empty((*shape, heads.head_dim), **partial)
    sums_BNZ2 = torch.empty((*shape, 2), **partial)
    at_once = min(num_slots, max(4, ceil_div(num_programs, rows.num_rows * heads.kv_heads)))
    _launch_splits(q_TND, kv_P2SKD, rows, scores, heads, tile, acc_BNZD, sums_BNZ2, at_once)
    _merge_splits[(rows.num_rows, heads.num_heads)](
        acc_BNZD,
        sums_BNZ2,
        rows.query_starts,
        rows.kv_lens,
        out_TND,
        num_slots,
        scores.sharpness,
        heads.num_heads,
        heads.head_dim,
        heads.padded_dim,
        scores.window or 0,
        tile.width,
        SPLIT,
        MOST_SPLITS,
        CHUNK,
        num_warps=4,
    )


def _launch_splits(
    q_TND: torch.Tensor,
    kv_P2SKD: torch.Tensor,
    rows: PagedRows,
    scores: Scores,
    heads: PagedHeads,
    tile: Tile,
    acc_BNZD: torch.Tensor,
    sums_BNZ2: torch.Tensor,
    at_once: int,
) -> None:
    """`at_once`: programs that take the splits of one row and key/value head."""
    _attend_splits[(rows.num_rows, heads.kv_heads, at_once)](
        q_TND,
        kv_P2SKD,
        rows.page_table,
        rows.query_starts,
        rows.kv_lens,
        acc_BNZD,
        sums_BNZ2,
        q_TND.stride(0),
        rows.page_table.stride(0),
        acc_BNZD.shape[2],
        scores.inner,
        scores.sharpness,
        *heads.constants(),
        scores.window or 0,
        scores.soft_cap is not None,
        tile.height,
        tile.width,
        SPLIT,
        MOST_SPLITS,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
