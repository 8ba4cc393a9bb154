"""Native norms, rotary embedding with KV store, gate, and paged attention over float32 activations.

Each has its plain torch twin in the file of that name above (rms_norm.py, rotary.py, store_kv.py,
silu_mul.py,
paged_attention.py). Shapes: T tokens, H hidden size, N query heads, K key/value heads, D head dim,
B rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .library import Library

KV_TYPES = {torch.float32: 0, torch.bfloat16: 1}


def _pool(kv_layer: torch.Tensor) -> tuple[int, int, int, int, int]:
    _, _, page_size, kv_heads, head_dim = kv_layer.shape
    return kv_layer.data_ptr(), KV_TYPES[kv_layer.dtype], page_size, kv_heads, head_dim


def rms_norm(
    library: Library, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
) -> torch.Tensor:
    """RMSNorm over the last axis of a contiguous float32 tensor."""
    out = torch.empty_like(x_TH)
    rows = x_TH.shape[0]
    library.functions(rows)["pp_rms_norm"](
        x_TH.data_ptr(), weight_H.data_ptr(), eps, rows, x_TH.shape[1], out.data_ptr()
    )
    return out


def add_rms_norm(
    library: Library,
    x_TH: torch.Tensor,
    residual_TH: torch.Tensor,
    weight_H: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(x + residual), x + residual); both inputs contiguous."""
    out, total = torch.empty_like(x_TH), torch.empty_like(x_TH)
    rows = x_TH.shape[0]
    library.functions(rows)["pp_add_rms_norm"](
        x_TH.data_ptr(),
        residual_TH.data_ptr(),
        weight_H.data_ptr(),
        eps,
        rows,
        x_TH.shape[1],
        out.data_ptr(),
        total.data_ptr(),
    )
    return out, total


def silu_mul(library: Library, gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up: contiguous [T, 2 * I] -> [T, I]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width)
    library.functions(rows)["pp_silu_mul"](gate_up.data_ptr(), rows, width, out.data_ptr())
    return out


def rope_store(
    library: Library,
    qkv: torch.Tensor,
    cos_sin: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    kv_layer: torch.Tensor,
    slots_T: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    """Split, normalise, rotate and store; return q [T, N, D]. All tensors contiguous."""
    rows, head_dim = qkv.shape[0], kv_layer.shape[4]
    q_TND = torch.empty(rows, num_heads, head_dim)
    q_norm, k_norm, eps = (None, None, 0.0) if norms is None else norms
    library.functions(rows)["pp_rope_store"](
        qkv.data_ptr(),
        cos_sin[0].data_ptr(),
        cos_sin[1].data_ptr(),
        None if q_norm is None else q_norm.data_ptr(),
        None if k_norm is None else k_norm.data_ptr(),
        eps,
        *_pool(kv_layer),
        slots_T.data_ptr(),
        rows,
        num_heads,
        q_TND.data_ptr(),
    )
    return q_TND


def attention(
    library: Library,
    q_TND: torch.Tensor,
    kv_layer: torch.Tensor,
    page_table: torch.Tensor,  # int32 [B, max_pages]
    query_starts: torch.Tensor,  # int32 [B + 1]
    kv_lens: torch.Tensor,  # int32 [B]
    window: int | None,
    scale: float,
) -> torch.Tensor:
    """Causal attention of every row's new tokens over its pages. Returns [T, N, D]."""
    out = torch.empty_like(q_TND)
    tokens, num_heads, _ = q_TND.shape
    library.functions(tokens)["pp_attention"](
        q_TND.data_ptr(),
        *_pool(kv_layer),
        page_table.data_ptr(),
        query_starts.data_ptr(),
        kv_lens.data_ptr(),
        kv_lens.numel(),
        page_table.shape[1],
        num_heads,
        window or 0,
        scale,
        out.data_ptr(),
    )
    return out


def argmax(library: Library, x_RV: torch.Tensor) -> torch.Tensor:
    """Index of each row's largest value, the first of equals: int64 [R]."""
    assert x_RV.is_contiguous() and x_RV.dtype == torch.float32, "the kernel reads plain rows"
    index = torch.empty(x_RV.shape[0], dtype=torch.int64)
    library.functions(x_RV.shape[0])["pp_argmax"](
        x_RV.data_ptr(), x_RV.shape[0], x_RV.shape[1], index.data_ptr()
    )
    return index


def cos_sin(
    library: Library, positions_T: torch.Tensor, inverse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cos and sin [T, D / 2] of int64 positions times float32 inverse frequencies."""
    rows, half = positions_T.numel(), inverse.numel()
    cos, sin = torch.empty(rows, half), torch.empty(rows, half)
    library.functions(rows)["pp_cos_sin"](
        positions_T.data_ptr(), inverse.data_ptr(), rows, half, cos.data_ptr(), sin.data_ptr()
    )
    return cos, sin


def gather_rows(library: Library, x_TH: torch.Tensor, index_R: torch.Tensor) -> torch.Tensor:
    """Rows of a contiguous float32 tensor by int64 index: [R, H]."""
    assert index_R.is_contiguous() and x_TH.is_contiguous(), "the kernel reads plain rows"
    rows, width = index_R.numel(), x_TH.shape[1]
    out = torch.empty(rows, width)
    library.functions(rows)["pp_gather_rows"](
        x_TH.data_ptr(), index_R.data_ptr(), rows, width, out.data_ptr()
    )
    return out


def concat_columns(library: Library, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Contiguous float32 [R, N_i] side by side: [R, sum of N_i]."""
    rows, stride = parts[0].shape[0], sum(part.shape[1] for part in parts)
    out = torch.empty(rows, stride)
    start = 0
    for part in parts:
        columns = out[:, start : start + part.shape[1]]
        library.functions(rows)["pp_put_columns"](
            part.data_ptr(), rows, part.shape[1], columns.data_ptr(), stride
        )
        start += part.shape[1]
    return out


def copy_rows(library: Library, x: torch.Tensor, out: torch.Tensor) -> None:
    """Copy one contiguous float32 tensor into another of as many elements, row by row."""
    assert x.is_contiguous() and out.is_contiguous(), "the kernel reads and writes plain rows"
    rows = x.shape[0]
    width = x.numel() // max(rows, 1)
    library.functions(rows)["pp_put_columns"](x.data_ptr(), rows, width, out.data_ptr(), width)
