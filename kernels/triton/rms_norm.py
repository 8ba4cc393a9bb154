"""RMSNorm, alone and with the residual added first: one program a row. Twins: kernels/rms_norm.py.

Shapes: T tokens, H hidden size. A row's sum is taken in an order that follows from H alone.
"""

from __future__ import annotations

import torch
import triton.language as tl

from .dialect import jit, power_of_two, row_warps


@jit
def _normalized(x, weight, eps, size: tl.constexpr):
    """The twin's roundings: to the tensor's type before the weight, and after it."""
    wide = x.to(tl.float32)
    mean = tl.sum(wide * wide, axis=0) / size
    unit = (wide * (1.0 / tl.sqrt(mean + eps))).to(x.dtype)
    return (unit.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@jit
def _rms_norm(x_ptr, weight_ptr, out_ptr, x_stride, eps, size: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < size
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    out = _normalized(x, weight, eps, size)
    tl.store(out_ptr + row * size + columns, out, mask=inside)


@jit
def _add_rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    x_stride,
    residual_stride,
    eps,
    size: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < size
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    residual = tl.load(residual_ptr + row * residual_stride + columns, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    total = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(total_ptr + row * size + columns, total, mask=inside)
    out = _normalized(total, weight, eps, size)
    tl.store(out_ptr + row * size + columns, out, mask=inside)


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in x's dtype; rows may be strided."""
    tokens, size = x_TH.shape
    assert x_TH.stride(1) == 1 and weight_H.is_contiguous(), "elements of a row lie side by side"
    out_TH = torch.empty((tokens, size), dtype=x_TH.dtype, device=x_TH.device)
    block = power_of_two(size)
    _rms_norm[(tokens,)](
        x_TH, weight_H, out_TH, x_TH.stride(0), eps, size, block, num_warps=row_warps(block)
    )
    return out_TH


def add_rms_norm(
    x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual); rows of both may be strided."""
    tokens, size = x_TH.shape
    assert x_TH.stride(1) == residual_TH.stride(1) == 1, "elements of a row lie side by side"
    assert weight_H.is_contiguous(), "elements of the weight lie side by side"
    out_TH = torch.empty((tokens, size), dtype=x_TH.dtype, device=x_TH.device)
    total_TH = torch.empty_like(out_TH)
    block = power_of_two(size)
    _add_rms_norm[(tokens,)](
        x_TH,
        residual_TH,
        weight_H,
        out_TH,
        total_TH,
        x_TH.stride(0),
        residual_TH.stride(0),
        eps,
        size,
        block,
        num_warps=row_warps(block),
    )
    return out_TH, total_TH
