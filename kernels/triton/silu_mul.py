"""The gate of a SwiGLU block: silu(gate) * up, without a copy of either. Twin: kernels/silu_mul.py.

Shapes: T tokens, I intermediate size.
"""

from __future__ import annotations

import torch
import triton.language as tl

from .dialect import ceil_div, jit, power_of_two

BLOCK = 1024  # elements of a program


@jit
def _silu_mul(gate_up_ptr, out_ptr, row_stride, size: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < size
    gate_ptr = gate_up_ptr + row * row_stride + columns
    gate = tl.load(gate_ptr, mask=inside, other=0.0)
    up = tl.load(gate_ptr + size, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    opened = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)  # rounded where the twin rounds
    out = (opened.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(out_ptr + row * size + columns, out, mask=inside)


def silu_mul(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up [T, I]; the input holds gate in its first half, then up. Rows may be
    strided.
    """
    tokens, both = gate_up_T2I.shape
    assert gate_up_T2I.stride(1) == 1 and both % 2 == 0, "a row is a gate and an up of one size"
    out_TI = torch.empty((tokens, both // 2), dtype=gate_up_T2I.dtype, device=gate_up_T2I.device)
    block = min(BLOCK, power_of_two(both // 2))
    grid = (tokens, ceil_div(both // 2, block))
    _silu_mul[grid](gate_up_T2I, out_TI, gate_up_T2I.stride(0), both // 2, block, num_warps=4)
    return out_TI
