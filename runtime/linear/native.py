"""Linear layers over native matrices: what int4_group.py, int8.py and dense_native.py share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...kernels.cpu.library import Library
from ...kernels.cpu.ops import concat_columns
from ...kernels.cpu.packed import (
    FLOATS,
    INT8,
    STORED_TYPES,
    PackedMatrix,
    StoredBlocks,
    stack_shapes,
)
from .method import Linear, Stored


class NativeLinear:
    """One packed matrix [N, K] and its bias."""

    def __init__(self, matrix: PackedMatrix, bias: torch.Tensor | None) -> None:
        self.matrix = matrix
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T + bias; integer storages round x to 8 bits per group of 32."""
        return self.matrix.multiply(x, self.bias)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Dequantized rows."""
        return self.matrix.rows(index)

    def dequantized(self) -> torch.Tensor:
        """The whole matrix in float32."""
        return self.matrix.dequantized()

    @property
    def num_bytes(self) -> int:
        """Bytes of blocks and bias."""
        return self.matrix.num_bytes + (0 if self.bias is None else 4 * self.bias.numel())


class StackedLinear:
    """Matrices of different storage whose outputs stand side by side (a file may keep v in more
    bits than q and k).
    """

    def __init__(self, library: Library, parts: Sequence[Linear]) -> None:
        self._library = library
        self._parts = list(parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Each part's outputs, one beside the other."""
        return concat_columns(self._library, [part(x) for part in self._parts])

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Dequantized rows."""
        return self.dequantized().index_select(0, index)

    def dequantized(self) -> torch.Tensor:
        """The parts one above the other."""
        return torch.cat([part.dequantized() for part in self._parts])

    @property
    def bias(self) -> torch.Tensor | None:
        """All biases; absent ones are zero."""
        if all(part.bias is None for part in self._parts):
            return None
        pieces = [
            torch.zeros(part.dequantized().shape[0]) if part.bias is None else part.bias
            for part in self._parts
        ]
        return torch.cat(pieces)

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.num_bytes for part in self._parts)


class NativeMethod:
    """Packs matrices natively: floats in `storage`, or as their own type where that is None.

    With a storage it also keeps the blocks of a GGUF file as they are.
    """

    def __init__(self, name: str, storage: int | None, library: Library) -> None:
        self.name = name
        self.keeps_blocks = storage is not None
        self._storage = storage
        self._library = library

    def pack(self, weights: list[Stored], biases: list[torch.Tensor] | None) -> Linear:
        """One matrix when all parts share a storage, else one matrix each."""
        storages = [self._storage_of(weight) for weight in weights]
        if len(set(storages)) == 1:
            bias = None if biases is None else torch.cat(biases).float()
            return self._matrix(weights, storages[0], bias)
        each = biases or [None] * len(weights)
        return StackedLinear(
            self._library,
            [
                self._matrix([weight], storage, bias)
                for weight, storage, bias in zip(weights, storages, each, strict=True)
            ],
        )

    def pack_embedding(self, weight: Stored) -> Linear:
        """An embedding or output layer: blocks as they are, floats in 8 bits where floats are
        rounded.
        """
        rounds = isinstance(weight, torch.Tensor) and self._storage is not None
        storage = INT8 if rounds else self._storage_of(weight)
        return self._matrix([weight], storage, None)

    def _storage_of(self, weight: Stored) -> int:
        if isinstance(weight, StoredBlocks):
            return STORED_TYPES[weight.type][1]
        return self._storage or FLOATS.get(weight.dtype, FLOATS[torch.float32])

    def _matrix(
        self, weights: Sequence[Stored], storage: int, bias: torch.Tensor | None
    ) -> NativeLinear:
        shapes = [(int(w.shape[0]), int(w.shape[1])) for w in weights]
        matrix = PackedMatrix(self._library, storage, stack_shapes(shapes))
        row = 0
        for weight, (rows, _) in zip(weights, shapes, strict=True):
            if isinstance(weight, StoredBlocks):
                matrix.put_stored(weight, row)
            else:
                matrix.put_floats(weight, row)
            row += rows
        return NativeLinear(matrix, bias)
