"""Blocks of GGUF's types Q5_0 and Q5_1, and of its K types (256 weights, scales within scales), to
floats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

# Letters: N blocks, B bytes of a block, J groups of a block, I weights of a group.


def q5_0(blocks_NB: np.ndarray) -> np.ndarray:
    """Scale, a fifth bit for each of 32 weights, nibbles: d * (q - 16)."""
    return half(blocks_NB, 0) * (_five_bits(blocks_NB, 2).astype("f4") - 16)


def q5_1(blocks_NB: np.ndarray) -> np.ndarray:
    """Scale, offset, a fifth bit for each of 32 weights, nibbles: d * q + m."""
    return half(blocks_NB, 0) * _five_bits(blocks_NB, 4).astype("f4") + half(blocks_NB, 2)


def q4_k(blocks_NB: np.ndarray) -> np.ndarray:
    """8 groups of 32 with 6-bit scales and offsets: d * scale * q - dmin * offset."""
    return _scaled(blocks_NB, _nibbles(blocks_NB[:, 16:144]))


def q5_k(blocks_NB: np.ndarray) -> np.ndarray:
    """As Q4_K, with the fifth bits of group j in bit j of 32 bytes."""
    import numpy as np

    high_NJI = blocks_NB[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None] & 1
    return _scaled(blocks_NB, _nibbles(blocks_NB[:, 48:176]) | high_NJI << 4)


def q6_k(blocks_NB: np.ndarray) -> np.ndarray:
    """16 groups of 16 with 8-bit scales: d * scale * (q - 32)."""
    import numpy as np

    count = blocks_NB.shape[0]
    low = blocks_NB[:, :128].reshape(count, 2, 1, 64)
    low = low >> np.array([0, 4], dtype=np.uint8)[None, None, :, None] & 15
    high = blocks_NB[:, 128:192].reshape(count, 2, 1, 32)
    high = high >> np.array([0, 2, 4, 6], dtype=np.uint8)[None, None, :, None] & 3
    q = low.reshape(count, 16, 16) | high.reshape(count, 16, 16) << 4
    scales = blocks_NB[:, 192:208].view(np.int8).astype("f4") * half(blocks_NB, 208)
    return (scales[:, :, None] * (q.astype("f4") - 32)).reshape(count, 256)


def half(blocks_NB: np.ndarray, at: int) -> np.ndarray:
    """The half-precision number at byte `at` of each block, float32 [N, 1]."""
    import numpy as np

    return np.ascontiguousarray(blocks_NB[:, at : at + 2]).view("<f2").astype("f4")


def _five_bits(blocks_NB: np.ndarray, at: int) -> np.ndarray:
    """32 numbers of 5 bits a block: one word of high bits, then nibbles."""
    import numpy as np

    word = np.ascontiguousarray(blocks_NB[:, at : at + 4]).view("<u4")
    high = (word >> np.arange(32, dtype=np.uint32) & 1).astype(np.uint8)
    packed = blocks_NB[:, at + 4 : at + 20]
    return np.concatenate([packed & 15, packed >> 4], axis=1) | high << 4


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """128 bytes a block to [N, 8, 32]: 32 bytes hold a group in their low and one in their high
    halves.
    """
    import numpy as np

    pairs = packed.reshape(-1, 4, 1, 32) >> np.array([0, 4], dtype=np.uint8)[:, None]
    return (pairs & 15).reshape(-1, 8, 32)


def _scaled(blocks_NB: np.ndarray, q_NJI: np.ndarray) -> np.ndarray:
    """With the scales and offsets of 8 groups, 6 bits each, packed in 12 bytes."""
    import numpy as np

    a, b, c = (blocks_NB[:, 4 + 4 * i : 8 + 4 * i] for i in range(3))
    scales = np.concatenate([a & 63, (c & 15) | (a >> 6) << 4], axis=1).astype("f4")
    offsets = np.concatenate([b & 63, (c >> 4) | (b >> 6) << 4], axis=1).astype("f4")
    scales, offsets = scales * half(blocks_NB, 0), offsets * half(blocks_NB, 2)
    return (scales[:, :, None] * q_NJI.astype("f4") - offsets[:, :, None]).reshape(-1, 256)
