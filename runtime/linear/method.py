"""The contract of a linear method: how weights are stored and multiplied."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from ...kernels.cpu.packed import StoredBlocks

Stored = torch.Tensor | StoredBlocks
"""A checkpoint's matrix: floats, or the blocks of a quantized file as they lie there."""


class Linear(Protocol):
    """One stored weight matrix [out, in], with its bias where it has one."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x @ weight.T + bias: [rows, in] -> [rows, out]."""
        ...

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Rows of the weights [len(index), in], dequantized: what an embedding looks up."""
        ...

    def dequantized(self) -> torch.Tensor:
        """The stored weights as a plain matrix [out, in], which the yardstick multiplies by."""
        ...

    def pieces(self) -> Iterator[torch.Tensor]:
        """The same matrix cut into [some rows, in], from the top, where it is made for the call:
        pieces that stay in a cache.
        """
        ...

    @property
    def bias(self) -> torch.Tensor | None:
        """Bias [out] or None."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and bias as stored."""
        ...


class LinearMethod(Protocol):
    """Makes `Linear`s from checkpoint tensors."""

    name: str
    keeps_blocks: bool  # whether it takes `StoredBlocks`

    def pack(self, weights: list[Stored], biases: list[torch.Tensor] | None) -> Linear:
        """Store matrices [out_i, in] one above the other as a single matrix."""
        ...

    def pack_embedding(self, weight: Stored, *, is_head: bool) -> Linear:
        """Store an embedding, in 8 bits at least; `is_head`: it is multiplied by, too."""
        ...

    def pack_head(self, weight: Stored) -> Linear:
        """Store an output layer of its own, in 8 bits at least."""
        ...
