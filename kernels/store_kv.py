"""Writing keys and values into the paged KV pool.

Shapes: P pages, S page size, K key/value heads, D head dim, T tokens. A layer's pool is [P, 2, S,
K, D]: keys at index 0,
values at 1. A slot is page * S + offset.
"""

from __future__ import annotations

import torch


def kv_rows(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """Row of each slot's key in the pool seen as [P * 2 * S, K, D]; its value is `page_size` rows
    further.
    """
    return slots + torch.div(slots, page_size, rounding_mode="floor") * page_size


def store_kv(
    pool_P2SKD: torch.Tensor, slots_T: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor
) -> None:
    """Write each token's key and value at its slot (int64 [T]). Slots must be distinct, but for the
    scratch page 0.
    """
    _, _, page_size, num_heads, head_dim = pool_P2SKD.shape
    rows = pool_P2SKD.view(-1, num_heads, head_dim)
    k_rows_T = kv_rows(slots_T, page_size)
    rows.index_copy_(0, k_rows_T, k_TKD.to(rows.dtype))
    rows.index_copy_(0, k_rows_T + page_size, v_TKD.to(rows.dtype))
