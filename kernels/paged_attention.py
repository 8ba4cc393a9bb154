"""Attention over paged keys and values in plain torch: the twin that every faster kernel is
compared with.

Shapes: P pages, S page size, K key/value heads, G query heads per key/value head, N = K * G, D head
dim, B rows, L keys, Q queries.
The pool of a layer is [P, 2, S, K, D] (see store_kv.py). Keys that are not there point at the
scratch page, so no stale
memory is ever read; masks are additive (0 or -inf).
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def gather_kv(pool_P2SKD: torch.Tensor, k_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values [*k_rows.shape, K, D] at the given rows of the pool seen as [P * 2 *
    S, K * D].
    """
    _, _, page_size, num_heads, head_dim = pool_P2SKD.shape
    rows = pool_P2SKD.view(-1, num_heads * head_dim)
    flat = k_rows.reshape(-1)
    shape = (*k_rows.shape, num_heads, head_dim)
    keys = rows.index_select(0, flat).view(shape)
    values = rows.index_select(0, flat + page_size).view(shape)
    return keys, values


def decode_attention(
    q_BND: torch.Tensor,
    pool_P2SKD: torch.Tensor,
    k_rows_BL: torch.Tensor,
    mask_BL: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """One query a row against its own keys. `mask_BL` is additive. Returns [B, N, D]."""
    batch, num_heads, head_dim = q_BND.shape
    keys, values = gather_kv(pool_P2SKD, k_rows_BL)
    kv_heads = keys.shape[2]
    q = q_BND.view(batch, kv_heads, num_heads // kv_heads, head_dim)
    out = scaled_dot_product_attention(
        q,
        keys.to(q.dtype).transpose(1, 2),
        values.to(q.dtype).transpose(1, 2),
        attn_mask=mask_BL[:, None, None, :],
        scale=scale,
    )
    return out.reshape(batch, num_heads, head_dim)


def prefill_attention(
    q_QND: torch.Tensor,
    pool_P2SKD: torch.Tensor,
    k_rows_L: torch.Tensor,
    mask_QL: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Q new queries of one request against its L keys. `mask_QL` is additive and holds causality
    and window.
    """
    num_queries, num_heads, head_dim = q_QND.shape
    keys, values = gather_kv(pool_P2SKD, k_rows_L)
    kv_heads = keys.shape[1]
    group = num_heads // kv_heads
    q = q_QND.view(num_queries, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    q = q.reshape(1, kv_heads, group * num_queries, head_dim)
    out = scaled_dot_product_attention(
        q,
        keys.to(q.dtype).transpose(0, 1)[None],
        values.to(q.dtype).transpose(0, 1)[None],
        attn_mask=mask_QL.repeat(group, 1)[None, None],
        scale=scale,
    )
    out = out.view(kv_heads, group, num_queries, head_dim).permute(2, 0, 1, 3)
    return out.reshape(num_queries, num_heads, head_dim)


def causal_mask(
    first_query: int, num_queries: int, num_keys: int, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """Additive mask [Q, L]: query i stands at position first_query + i and sees itself and at most
    window - 1 before it.
    """
    positions = torch.arange(first_query, first_query + num_queries)[:, None]
    keys = torch.arange(num_keys)[None, :]
    hidden = keys > positions
    if window is not None:
        hidden |= keys <= positions - window
    return torch.zeros(num_queries, num_keys, dtype=dtype).masked_fill_(hidden, float("-inf"))
