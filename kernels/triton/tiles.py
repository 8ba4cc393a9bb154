"""Sizes of attention's tiles, from head size, number type and card alone: what a batch holds never
changes the order of a sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

Capability = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Tile:
    """`height`: rows of queries times heads; `width`: keys at a time."""

    height: int
    width: int
    num_warps: int
    num_stages: int  # tiles of keys that are under way at once


def decode_tile(group: int, padded_dim: int, item_bytes: int, capability: Capability) -> Tile:
    """For one query and the `group` heads that share a key; tensor cores take 16 rows or more."""
    row_bytes = padded_dim * item_bytes
    height = max(16, 1 << (group - 1).bit_length())
    if not _has_tensor_cores(capability):
        return Tile(height, 32 if padded_dim <= 128 else 16, 8, 1)
    return Tile(height, 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16, 4, 3)


def prefill_tile(padded_dim: int, item_bytes: int, capability: Capability) -> Tile:
    """For many queries: as high as registers hold, as wide as shared memory holds."""
    if item_bytes == 4:
        return Tile(32, 16, 8, 1)  # twice as wide spills registers
    if not _has_tensor_cores(capability):
        return Tile(32, 32 if padded_dim <= 128 else 16, 8, 1)
    if padded_dim > 128:
        return Tile(64, 32, 4 if capability[0] == 9 else 8, 2)
    return Tile(128, 64, 8, 3 if capability[0] == 9 else 2)


def _has_tensor_cores(capability: Capability) -> bool:
    """Those that Triton uses; without them a tile's operands lie in registers, so it is small."""
    return capability >= (8, 0)


@cache
def capability_of(device: torch.device) -> Capability:
    """Compute capability of a card; of a CPU, where kernels are interpreted, a new one's."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
