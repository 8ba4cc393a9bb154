"""Linear layers over native matrices: what int4_group.py, int8.py and dense_native.py share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ...kernels.cpu.library import Library
from ...kernels.cpu.ops import concat_columns
from ...kernels.cpu.packed import (
    FLOATS,
    INT4,
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

    def with_best(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, and int64 [R]: where each row's largest output stands."""
        return self.matrix.multiply_best(x, self.bias)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Dequantized rows."""
        return self.matrix.rows(index)

    def dequantized(self) -> torch.Tensor:
        """The whole matrix in float32."""
        return self.matrix.dequantized()

    def pieces(self) -> Iterator[torch.Tensor]:
        """Rows in float32, 2 MiB at a time."""
        return self.matrix.pieces()

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

    def pieces(self) -> Iterator[torch.Tensor]:
        """Those of each part in turn."""
        for part in self._parts:
            yield from part.pieces()

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


ROUND_TO = {"int4": INT4, "int8": INT8}
"""Storage by the plan's quantization; without one, floats are stored as their own type."""


class NativeMethod:
    """Packs matrices natively: the blocks of a GGUF file in the storage of their type, floats in
    their own, and both rounded where the plan allows fewer bits.
    """

    def __init__(
        self,
        name: str,
        library: Library,
        quantization: str = "stored",
        *,
        keeps_blocks: bool = True,
    ) -> None:
        self.name = name
        self.keeps_blocks = keeps_blocks
        self._library = library
        self._round_to = ROUND_TO.get(quantization)

    def pack(self, weights: list[Stored], biases: list[torch.Tensor] | None) -> Linear:
        """One matrix when all parts share a storage, else one matrix each."""
        storages = [self._storage_of(weight, self._round_to) for weight in weights]
        if len(set(storages)) == 1:
            bias = None if biases is None else torch.cat(biases).float()
            return self._matrix(weights, storages[0], bias)
        each = biases or [None] * len(weights)
        return StackedLinear(
            self._library,
            [
                self._matrix([weight], storage, None if bias is None else bias.float())
                for weight, storage, bias in zip(weights, storages, each, strict=True)
            ],
        )

    def pack_embedding(self, weight: Stored, *, is_head: bool) -> Linear:
        """As other matrices, but never in fewer than 8 bits where the file has as many."""
        at_least = None if self._round_to is None else INT8
        return self._matrix([weight], self._storage_of(weight, at_least), None)

    def pack_head(self, weight: Stored) -> Linear:
        """The same."""
        return self.pack_embedding(weight, is_head=True)

    def _storage_of(self, weight: Stored, round_to: int | None) -> int:
        if isinstance(weight, StoredBlocks):
            own = STORED_TYPES[weight.type][1]
            return round_to or INT8 if own == INT8 else own
        return round_to or FLOATS.get(weight.dtype, FLOATS[torch.float32])

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
