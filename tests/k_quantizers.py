"""Simple quantizers to GGUF's K types for tests: the gguf package reads those types but does not
write them.
"""

from __future__ import annotations

import numpy as np

SIZES = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
"""Bytes of a block of 256 weights."""


def quantize(weights: np.ndarray, type_name: str) -> np.ndarray:
    """Float32 [rows, inputs], inputs a multiple of 256, to blocks uint8 [rows, bytes]."""
    blocks = weights.astype(np.float32).reshape(-1, 256)
    made = _q6(blocks) if type_name == "Q6_K" else _q45(blocks, type_name == "Q5_K")
    return made.reshape(weights.shape[0], -1)


def random_blocks(type_name: str, rows: int, inputs: int, seed: int = 0) -> np.ndarray:
    """Any bytes with scales of sane size, of either sign: uint8 [rows, bytes]."""
    rng = np.random.default_rng(seed)
    count, size = rows * inputs // 256, SIZES[type_name]
    blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
    places = (208,) if type_name == "Q6_K" else (0, 2)
    for at in places:
        scale = rng.uniform(1e-5, 1e-3, (count, 1)) * rng.choice([-1, 1], (count, 1))
        blocks[:, at : at + 2] = (
            (scale if type_name == "Q6_K" else abs(scale)).astype("f2").view("u1")
        )
    return blocks.reshape(rows, -1)


def _half(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(bytes, float32) of half-precision numbers [N, 1]."""
    half = values.astype(np.float16)
    return half.view(np.uint8), half.astype(np.float32)


def _q45(blocks: np.ndarray, is_five: bool) -> np.ndarray:
    groups, levels = blocks.reshape(-1, 8, 32), 31 if is_five else 15
    offset = -np.minimum(groups.min(-1), 0)
    step = (groups.max(-1) + offset) / levels
    d_bytes, d = _half(step.max(-1, keepdims=True) / 63)
    m_bytes, m = _half(offset.max(-1, keepdims=True) / 63)
    scale, low = (
        np.clip(np.round(a / np.maximum(b, 1e-12)), 0, 63) for a, b in ((step, d), (offset, m))
    )
    steps = np.maximum(scale * d, 1e-12)[:, :, None]
    q = np.clip(np.round((groups + (low * m)[:, :, None]) / steps), 0, levels).astype(np.uint8)
    scale, low = scale.astype(np.uint8), low.astype(np.uint8)
    packed = [scale[:, :4] | (scale[:, 4:] >> 4) << 6, low[:, :4] | (low[:, 4:] >> 4) << 6]
    packed.append((scale[:, 4:] & 15) | (low[:, 4:] & 15) << 4)
    nibbles = ((q[:, ::2] & 15) | (q[:, 1::2] & 15) << 4).reshape(-1, 128)
    parts = [d_bytes, m_bytes, *packed]
    if is_five:
        parts.append(np.bitwise_or.reduce([(q[:, j] >> 4) << j for j in range(8)]))
    return np.concatenate([*parts, nibbles], axis=1)


def _q6(blocks: np.ndarray) -> np.ndarray:
    groups = blocks.reshape(-1, 16, 16)
    step = np.abs(groups).max(-1) / 31
    d_bytes, d = _half(step.max(-1, keepdims=True) / 127)
    scale = np.clip(np.round(step / np.maximum(d, 1e-12)), 1, 127)
    q = np.clip(np.round(groups / np.maximum(scale * d, 1e-12)[:, :, None]), -32, 31) + 32
    q = q.astype(np.uint8).reshape(-1, 2, 4, 32)  # halves of 128, each of 4 parts
    low = np.concatenate(
        [q[:, :, 0] & 15 | (q[:, :, 2] & 15) << 4, q[:, :, 1] & 15 | (q[:, :, 3] & 15) << 4],
        axis=-1,
    )
    high = np.bitwise_or.reduce([(q[:, :, k] >> 4) << (2 * k) for k in range(4)])
    scales = scale.astype(np.int8).view(np.uint8)
    return np.concatenate([low.reshape(-1, 128), high.reshape(-1, 64), scales, d_bytes], axis=1)
