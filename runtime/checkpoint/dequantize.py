"""Stored bytes of a GGUF tensor to a float tensor, a few thousand blocks at a time.

Bit for bit what `gguf.quants.dequantize` gives (a test compares them).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from . import k_quants
from .gguf_file import BLOCKS
from .k_quants import half

if TYPE_CHECKING:
    import numpy as np
    import torch

PLAIN = ("F32", "F16", "BF16")
AT_ONCE = 8192  # blocks whose temporary copies are held at once


def dequantize(data: memoryview, type_name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A fresh tensor of `shape`: plain types in their own dtype, quantized ones in float32."""
    import numpy as np
    import torch

    raw = np.frombuffer(data, dtype=np.uint8)
    if type_name in PLAIN:
        dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        return torch.from_numpy(raw.copy()).view(dtypes[type_name]).reshape(shape)
    weights, size = BLOCKS[type_name]
    blocks_NB = raw.reshape(-1, size)
    out = torch.empty(blocks_NB.shape[0], weights)
    with np.errstate(invalid="ignore", over="ignore"):  # damaged scales may be infinite
        for start in range(0, blocks_NB.shape[0], AT_ONCE):
            piece = DECODERS[type_name](blocks_NB[start : start + AT_ONCE])
            out[start : start + AT_ONCE] = torch.from_numpy(piece)
    return out.reshape(shape)


def _nibbles(blocks_NB: np.ndarray, at: int) -> np.ndarray:
    """16 bytes a block to 32 numbers: the low halves first, then the high ones."""
    import numpy as np

    packed = blocks_NB[:, at:]
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype("f4")


def _q8_0(blocks_NB: np.ndarray) -> np.ndarray:
    return blocks_NB[:, 2:].view("i1").astype("f4") * half(blocks_NB, 0)


def _q4_0(blocks_NB: np.ndarray) -> np.ndarray:
    return (_nibbles(blocks_NB, 2) - 8) * half(blocks_NB, 0)


def _q4_1(blocks_NB: np.ndarray) -> np.ndarray:
    return _nibbles(blocks_NB, 4) * half(blocks_NB, 0) + half(blocks_NB, 2)


DECODERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": k_quants.q5_0,
    "Q5_1": k_quants.q5_1,
    "Q4_K": k_quants.q4_k,
    "Q5_K": k_quants.q5_k,
    "Q6_K": k_quants.q6_k,
}
"""Type -> blocks uint8 [N, B] to float32 [N, weights of a block]."""
QUANTIZED = tuple(DECODERS)
