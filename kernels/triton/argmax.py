"""Index of each row's largest value, the first of equals; a NaN is larger than any number. Twin:
torch.argmax.

Value and index become one integer whose order is the wanted one: its maximum is exact, whoever
takes it and in whatever order. Shapes: R rows, V vocabulary, S parts of a row.
"""

from __future__ import annotations

import torch
import triton.language as tl

from .dialect import ceil_div, jit, power_of_two

BLOCK = 4096  # elements of a part


@jit
def _largest_of_part(x_ptr, found_ptr, x_stride, size, num_parts, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    columns = part * block + tl.arange(0, block)
    inside = columns < size
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # the order of floats among integers
    order = tl.where(x == 0.0, 0, order)  # of either sign
    order = tl.where(x != x, 0x7FFFFFFF, order)
    key = (order.to(tl.int64) << 32) | (0x7FFFFFFF - columns).to(tl.int64)
    key = tl.where(inside, key, -0x7FFFFFFFFFFFFFFF)
    tl.store(found_ptr + row * num_parts + part, tl.max(key, axis=0))


@jit
def _largest_of_row(found_ptr, out_ptr, num_parts, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, block)
    found = tl.load(
        found_ptr + row * num_parts + parts, mask=parts < num_parts, other=-0x7FFFFFFFFFFFFFFF
    )
    tl.store(out_ptr + row, 0x7FFFFFFF - (tl.max(found, axis=0) & 0x7FFFFFFF))


def argmax(x_RV: torch.Tensor) -> torch.Tensor:
    """int64 [R] of float rows, which may be strided."""
    rows, size = x_RV.shape
    assert x_RV.stride(1) == 1, "elements of a row lie side by side"
    num_parts = ceil_div(size, BLOCK)
    found_RS = torch.empty((rows, num_parts), dtype=torch.int64, device=x_RV.device)
    out_R = torch.empty(rows, dtype=torch.int64, device=x_RV.device)
    _largest_of_part[(rows, num_parts)](
        x_RV, found_RS, x_RV.stride(0), size, num_parts, BLOCK, num_warps=8
    )
    _largest_of_row[(rows,)](found_RS, out_R, num_parts, power_of_two(num_parts), num_warps=1)
    return out_R
