"""What all Triton kernels share: a matrix product and a hyperbolic tangent that mean the same on a
GPU and in Triton's interpreter, and the sizes of launches.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton import knobs

jit: Any = triton.jit  # by its type a kernel takes no launch options, and a part returns nothing

INTERPRETED = tl.constexpr(knobs.runtime.interpret)
"""TRITON_INTERPRET=1 when the kernels are defined: they run in numpy, on tensors of the CPU."""


@jit
def dot(a, b, acc):
    """acc + a @ b, summed in float32; float32 operands are not rounded to tf32.

    The interpreter multiplies the bits of bfloat16 as if they were integers, and says nothing.
    """
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@jit
def tanh(x):
    """Hyperbolic tangent of float32, to 1e-7; the interpreter has none."""
    small = tl.exp2(tl.abs(x) * -2.8853900817779268)  # -2 / ln 2
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0.0, -size, size)


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def ceil_div(size: int, part: int) -> int:
    """How many parts hold `size`."""
    return -(-size // part)


def row_warps(block: int) -> int:
    """Warps of a program that holds `block` elements of one row: 16 in each thread, at most."""
    return min(max(block // 512, 1), 16)
