"""Splits q, k and v, normalises q and k where the model does, rotates them, and stores keys and
values in their pages: one launch. Twins: kernels/rms_norm.py, rotary.py, store_kv.py.

Shapes: T tokens, N query heads, K key/value heads, D head dim, F = D / 2, P pages, S page size.
"""

from __future__ import annotations

import torch
import triton.language as tl

from .dialect import ceil_div, jit, power_of_two

HEADS = 8  # of a program
Norms = tuple[torch.Tensor, torch.Tensor, float]
"""Weights [D] of q and of k, and eps."""


@jit
def _unit(first, second, first_weight, second_weight, eps, head_dim: tl.constexpr):
    """Both halves of RMSNorm over a head, rounded where the twin rounds."""
    wide, far = first.to(tl.float32), second.to(tl.float32)
    mean = (tl.sum(wide * wide, axis=1) + tl.sum(far * far, axis=1)) / head_dim
    scale = (1.0 / tl.sqrt(mean + eps))[:, None]
    wide = (wide * scale).to(first.dtype).to(tl.float32) * first_weight.to(tl.float32)
    far = (far * scale).to(first.dtype).to(tl.float32) * second_weight.to(tl.float32)
    return wide.to(first.dtype), far.to(first.dtype)


@jit
def _rope_store(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    slots_ptr,
    kv_ptr,
    q_out_ptr,
    qkv_stride,
    eps,
    num_heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    half: tl.constexpr,  # of the head, padded to a power of two
    page_size: tl.constexpr,
    has_norms: tl.constexpr,
    heads: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads + tl.arange(0, heads)
    column = tl.arange(0, half)
    in_half = column < head_dim // 2
    inside = (head < num_heads + 2 * kv_heads)[:, None] & in_half[None, :]
    is_q, is_v = head < num_heads, head >= num_heads + kv_heads

    from_ptr = qkv_ptr + token * qkv_stride + head[:, None] * head_dim + column[None, :]
    first = tl.load(from_ptr, mask=inside, other=0.0)
    second = tl.load(from_ptr + head_dim // 2, mask=inside, other=0.0)
    turned_first, turned_second = first, second
    if has_norms:
        weight_ptr = tl.where(is_q[:, None], q_weight_ptr, k_weight_ptr) + column[None, :]
        first_weight = tl.load(weight_ptr, mask=inside, other=0.0)
        second_weight = tl.load(weight_ptr + head_dim // 2, mask=inside, other=0.0)
        turned_first, turned_second = _unit(
            first, second, first_weight, second_weight, eps, head_dim
        )
    angle = token * (head_dim // 2) + column
    cos = tl.load(cos_ptr + angle, mask=in_half, other=1.0).to(first.dtype).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + angle, mask=in_half, other=0.0).to(first.dtype).to(tl.float32)[None, :]
    wide, far = turned_first.to(tl.float32), turned_second.to(tl.float32)
    turned_first = (wide * cos - far * sin).to(first.dtype)
    turned_second = (far * cos + wide * sin).to(first.dtype)

    q_ptr = q_out_ptr + (token * num_heads + head[:, None]) * head_dim + column[None, :]
    q_mask = inside & is_q[:, None]
    tl.store(q_ptr, turned_first, mask=q_mask)
    tl.store(q_ptr + head_dim // 2, turned_second, mask=q_mask)

    slot = tl.load(slots_ptr + token)
    key_row = slot // page_size * (2 * page_size) + slot % page_size
    row = tl.where(is_v, key_row + page_size, key_row)
    kv_head = tl.where(is_v, head - num_heads - kv_heads, head - num_heads)
    to_ptr = kv_ptr + (row * kv_heads + kv_head)[:, None] * head_dim + column[None, :]
    kv_mask = inside & (head >= num_heads)[:, None]
    kept_first = tl.where(is_v[:, None], first, turned_first)
    kept_second = tl.where(is_v[:, None], second, turned_second)
    tl.store(to_ptr, kept_first.to(kv_ptr.dtype.element_ty), mask=kv_mask)
    tl.store(to_ptr + head_dim // 2, kept_second.to(kv_ptr.dtype.element_ty), mask=kv_mask)


def norm_rope_store(
    qkv: torch.Tensor,  # [T, (N + 2K) * D]; rows may be strided
    cos_TF: torch.Tensor,  # float32
    sin_TF: torch.Tensor,
    norms: Norms | None,
    kv_P2SKD: torch.Tensor,
    slots_T: torch.Tensor,  # int64, page * S + offset
    num_heads: int,
) -> torch.Tensor:
    """Write keys and values at their slots; return the rotated q [T, N, D]. Slots must be distinct,
    but for the scratch page 0.
    """
    _, _, page_size, kv_heads, head_dim = kv_P2SKD.shape
    tokens = qkv.shape[0]
    assert qkv.stride(1) == 1 and kv_P2SKD.is_contiguous(), "heads and pages lie side by side"
    assert cos_TF.is_contiguous() and sin_TF.is_contiguous(), "angles of a token lie side by side"
    assert slots_T.is_contiguous(), "slots lie side by side"
    q_TND = torch.empty((tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight, eps = norms or (cos_TF, cos_TF, 0.0)  # not read without norms
    half = power_of_two(head_dim // 2)
    _rope_store[(tokens, ceil_div(num_heads + 2 * kv_heads, HEADS))](
        qkv,
        cos_TF,
        sin_TF,
        q_weight,
        k_weight,
        slots_T,
        kv_P2SKD,
        q_TND,
        qkv.stride(0),
        eps,
        num_heads,
        kv_heads,
        head_dim,
        half,
        page_size,
        norms is not None,
        HEADS,
        num_warps=max(1, HEADS * half // 256),
    )
    return q_TND
