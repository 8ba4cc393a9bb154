"""Stored bytes of a GGUF tensor to a float tensor: the block formats F32, F16, BF16, Q8_0, Q4_0 and
Q4_1.

Bit for bit what `gguf.quants.dequantize` gives (a test compares them).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PLAIN = ("F32", "F16", "BF16")
QUANTIZED = ("Q8_0", "Q4_0", "Q4_1")
BLOCK = 32  # elements of one quantized block


def dequantize(data: memoryview, type_name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A fresh tensor of `shape`: plain types in their own dtype, quantized ones in float32."""
    import torch

    if type_name in PLAIN:
        dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        return _bytes(data).view(dtypes[type_name]).reshape(shape)
    blocks_NB = _bytes(data).reshape(-1, {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}[type_name])
    decode = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1}[type_name]
    return decode(blocks_NB).reshape(shape)


def _bytes(data: memoryview) -> torch.Tensor:
    """A copy as uint8: the map is read-only, and a view of it would keep the file open."""
    import numpy
    import torch

    return torch.from_numpy(numpy.array(numpy.frombuffer(data, dtype=numpy.uint8)))


def _scale(blocks_NB: torch.Tensor, at: int) -> torch.Tensor:
    import torch

    return blocks_NB[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(blocks_NB: torch.Tensor, at: int) -> torch.Tensor:
    """16 bytes a block to 32 numbers: the low halves first, then the high ones."""
    import torch

    packed = blocks_NB[:, at:]
    values = torch.empty(packed.shape[0], BLOCK, dtype=torch.float32)
    values[:, : BLOCK // 2] = packed & 15
    values[:, BLOCK // 2 :] = packed >> 4
    return values


def _q8_0(blocks_NB: torch.Tensor) -> torch.Tensor:
    import torch

    return blocks_NB[:, 2:].view(torch.int8).float().mul_(_scale(blocks_NB, 0))


def _q4_0(blocks_NB: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks_NB, 2).sub_(8).mul_(_scale(blocks_NB, 0))


def _q4_1(blocks_NB: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks_NB, 4).mul_(_scale(blocks_NB, 0)).add_(_scale(blocks_NB, 2))
