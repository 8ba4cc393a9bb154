"""Attention of rows with several new tokens over what is cached and the new tokens themselves, up
to each. Twin: kernels/paged_attention.py.

A program takes some queries of one row with all the heads that share a key, so that each key is
read once for them. Tiles of keys lie at fixed places: a query's bits do not depend on where it
stands in its program. Programs find their row when they run: a graph may hold the kernel. Shapes
as in paged.py.
"""

from __future__ import annotations

import torch
import triton.language as tl

from .dialect import jit
from .paged import PagedHeads, PagedRows, Scores, check_layout, key_rows, raw_scores, soften
from .tiles import Tile, capability_of, prefill_tile


@jit
def _row_of(block, query_starts_ptr, num_rows, queries: tl.constexpr):
    """The row whose queries a program takes: blocks of row i begin at start_i // queries + i."""
    low = block * 0
    high = low + num_rows
    while high - low > 1:
        middle = (low + high) // 2
        is_past = tl.load(query_starts_ptr + middle) // queries + middle > block
        high = tl.where(is_past, middle, high)
        low = tl.where(is_past, low, middle)
    return low


@jit
def _queries_of(block, query_starts_ptr, num_rows, queries: tl.constexpr):
    """Row of a block, its first token and number of tokens, and the block's first one of these."""
    row = _row_of(block, query_starts_ptr, num_rows, queries)
    start = tl.load(query_starts_ptr + row)
    length = tl.load(query_starts_ptr + row + 1) - start
    return row, start, length, (block - start // queries - row) * queries


@jit
def _key_range(before, kv_len, queries: tl.constexpr, window: tl.constexpr, width: tl.constexpr):
    """Of queries from position `before` on: where to begin, from where and up to where every query
    sees every key, and the end.
    """
    high = tl.minimum(before + queries, kv_len)
    all_see = (before + 1) // width * width
    low = before * 0
    edge = low
    if window:
        low = tl.maximum(before - window + 1, 0) // width * width
        edge = (tl.maximum(before + queries - window, 0) + width - 1) // width * width
        edge = tl.minimum(tl.maximum(edge, low), all_see)
    return low, edge, all_see, high


@jit
def _tiles(
    low,
    high,
    stop,  # tokens that there are keys of
    q,
    position,
    best,
    total,
    acc,
    kv_ptr,
    pages_ptr,
    kv_head,
    inner,
    sharpness,
    is_masked: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    page_size: tl.constexpr,
    window: tl.constexpr,
    has_cap: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
):
    """Keys low .. high - 1, masked where some query does not see some of them."""
    column = tl.arange(0, padded_dim)
    in_head = (column < head_dim)[None, :]
    for first in range(low, high, width):
        tokens = first + tl.arange(0, width)
        inside = tokens < stop
        key_row = key_rows(pages_ptr, first, tokens, inside, page_size, width)
        place = (key_row * kv_heads + kv_head)[:, None] * head_dim + column[None, :]
        mask = in_head
        if is_masked:
            mask = inside[:, None] & in_head
        k = tl.load(kv_ptr + place, mask=mask, other=0.0)
        v = tl.load(kv_ptr + place + page_size * kv_heads * head_dim, mask=mask, other=0.0)
        raw = raw_scores(q, k.to(q.dtype), inner, has_cap, height, width)
        if is_masked:
            seen = tokens[None, :] <= position[:, None]
            if window:
                seen = seen & (tokens[None, :] > position[:, None] - window)
            raw = tl.where(seen, raw, float("-inf"))
        best, total, acc = soften(raw, v.to(q.dtype), best, total, acc, sharpness)
    return best, total, acc


@jit(do_not_specialize=["page_stride", "num_rows"])
def _attend_blocks(
    q_ptr,
    kv_ptr,
    page_table_ptr,
    query_starts_ptr,
    kv_lens_ptr,
    out_ptr,
    q_stride,
    page_stride,
    num_rows,
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
):
    group: tl.constexpr = num_heads // kv_heads
    queries: tl.constexpr = height // group
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # later queries see more: they go first
    kv_head = tl.program_id(1)
    row, start, length, first_query = _queries_of(block, query_starts_ptr, num_rows, queries)
    if (length < 2) | (first_query >= length):
        return
    kv_len = tl.load(kv_lens_ptr + row)
    place_in_block = tl.arange(0, height)
    query = first_query + place_in_block // group
    head = kv_head * group + place_in_block % group
    column = tl.arange(0, padded_dim)
    is_query = (place_in_block < queries * group) & (query < length)
    mask = is_query[:, None] & (column < head_dim)[None, :]
    token = (start + query).to(tl.int64)
    q_place = (token * q_stride + head * head_dim)[:, None] + column[None, :]
    q = tl.load(q_ptr + q_place, mask=mask, other=0.0)

    position = kv_len - length + query
    before = kv_len - length + first_query  # position of the first query here
    low, edge, all_see, high = _key_range(before, kv_len, queries, window, width)
    best = tl.full([height], float("-inf"), dtype=tl.float32)
    total = tl.zeros([height], dtype=tl.float32)
    acc = tl.zeros([height, padded_dim], dtype=tl.float32)
    pages_ptr = page_table_ptr + row.to(tl.int64) * page_stride
    if window:
        best, total, acc = _tiles(
            low, edge, high, q, position, best, total, acc, kv_ptr, pages_ptr, kv_head, inner,
            sharpness, True, kv_heads, head_dim, padded_dim, page_size, window, has_cap, height,
            width,
        )  # fmt: skip
    best, total, acc = _tiles(
        edge, all_see, high, q, position, best, total, acc, kv_ptr, pages_ptr, kv_head, inner,
        sharpness, False, kv_heads, head_dim, padded_dim, page_size, window, has_cap, height,
        width,
    )  # fmt: skip
    best, total, acc = _tiles(
        all_see, high, high, q, position, best, total, acc, kv_ptr, pages_ptr, kv_head, inner,
        sharpness, True, kv_heads, head_dim, padded_dim, page_size, window, has_cap, height,
        width,
    )  # fmt: skip
    out = acc / tl.where(is_query, total, 1.0)[:, None]
    out_place = ((token * num_heads + head) * head_dim)[:, None] + column[None, :]
    tl.store(out_ptr + out_place, out.to(out_ptr.dtype.element_ty), mask=mask)


def prefill_attention(
    q_TND: torch.Tensor,
    kv_P2SKD: torch.Tensor,
    rows: PagedRows,
    scores: Scores,
    out_TND: torch.Tensor,
    *,
    tile: Tile | None = None,
) -> None:
    """Write the output of every row that has two new tokens or more; other rows' tokens stay as
    they are. The new keys are already stored. Tokens of `q_TND` may be strided, `out_TND` is
    contiguous.
    """
    check_layout(q_TND, kv_P2SKD, rows)
    heads = PagedHeads.of(q_TND, kv_P2SKD)
    if tile is None:
        card = capability_of(q_TND.device)
        tile = prefill_tile(heads.padded_dim, q_TND.element_size(), card)
    num_blocks = q_TND.shape[0] // (tile.height // heads.group_size) + rows.num_rows
    _attend_blocks[(num_blocks, heads.kv_heads)](
        q_TND,
        kv_P2SKD,
        rows.page_table,
        rows.query_starts,
        rows.kv_lens,
        out_TND,
        q_TND.stride(0),
        rows.page_table.stride(0),
        rows.num_rows,
        scores.inner,
        scores.sharpness,
        *heads.constants(),
        scores.window or 0,
        scores.soft_cap is not None,
        tile.height,
        tile.width,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
