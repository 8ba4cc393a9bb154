"""Weight matrices in native layouts, quantized or not, and the linear layer over them.

Shapes: R rows of activations, N outputs, K inputs. The layout stands in linear.h: blocks of 8
interleaved output rows and 32 inputs, with scales in half precision, and offsets where these do
not follow from the scales. Activations are rounded to 8 bits per row and group of 32; products of
a group are summed exactly in integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .library import Library

INT4, INT4_SYMMETRIC, INT8 = 4, 5, 8
INTEGERS = (INT4, INT4_SYMMETRIC, INT8)
FLOATS = {torch.bfloat16: 16, torch.float16: 17, torch.float32: 32}
"""Storage of float weights, which are multiplied without rounding activations."""
FLOAT_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
"""What pack.cpp calls float weights that it rounds to integers."""
STORED_TYPES = {
    "Q4_0": (2, INT4_SYMMETRIC),
    "Q4_1": (3, INT4),
    "Q5_0": (6, INT8),
    "Q5_1": (7, INT8),
    "Q8_0": (8, INT8),
    "Q4_K": (12, INT4),
    "Q5_K": (13, INT8),
    "Q6_K": (14, INT8),
}
"""GGUF type -> its number, and the native storage that holds it: Q4_0, Q4_1, Q5_0 and Q8_0 exactly,
Q4_K but for scales rounded to half precision; Q5_1, Q5_K and Q6_K are rounded to 8 bits."""
GROUP = 32
PIECE_NUMBERS = 1 << 19  # of weights made float32 to be multiplied at once: 2 MiB
FLOATS_AT_ONCE = 1 << 20  # widened copies of weights are made in pieces of so many


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredBlocks:
    """A GGUF tensor as it lies in the file: `data` uint8, rows of blocks; `row_order[i]` is the
    file's row for row i.
    """

    data: np.ndarray
    type: str  # of STORED_TYPES; inputs are a multiple of its block
    shape: tuple[int, int]
    row_order: np.ndarray | None = None  # int32


class PackedMatrix:
    """A matrix [N, K] in native blocks."""

    def __init__(self, library: Library, storage: int, shape: tuple[int, int]) -> None:
        self.storage = storage
        self.shape = shape
        self._library = library
        num_bytes = library.quick["pp_packed_bytes"](storage, *shape)
        self.blocks = library.memory.zeros(num_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks."""
        return self.blocks.numel()

    def put_stored(self, stored: StoredBlocks, first_row: int) -> None:
        """Interleave a GGUF tensor as rows first_row..: as it is where this matrix has the storage
        of its type, else rounded to it. INT4_SYMMETRIC takes Q4_0 only.
        """
        assert self.storage in INTEGERS, "blocks become integers"
        is_symmetric = STORED_TYPES[stored.type][1] == INT4_SYMMETRIC
        assert is_symmetric or self.storage != INT4_SYMMETRIC, "weights have offsets"
        order = None if stored.row_order is None else stored.row_order.ctypes.data
        self._put(
            stored.data.ctypes.data, STORED_TYPES[stored.type][0], stored.shape, order, first_row
        )

    def put_floats(self, weights: torch.Tensor, first_row: int) -> None:
        """Store a float matrix as rows first_row..: int4 rounds to the step and offset of least
        squared error that a search finds, int8 symmetrically, float storages to their type.
        """
        assert self.storage != INT4_SYMMETRIC, "rounding to 4 bits finds offsets"
        if self.storage in (INT4, INT8):
            number = FLOAT_NUMBERS.get(weights.dtype)
            weights = (weights if number is not None else weights.float()).contiguous()
            self._put(weights.data_ptr(), number or 0, tuple(weights.shape), None, first_row)
            return
        rows, inputs = weights.shape
        at_once = max(1, FLOATS_AT_ONCE // max(1, inputs))
        for start in range(0, rows, at_once):
            piece = weights[start : start + at_once].float().contiguous()
            self._library.long["pp_pack_floats"](
                piece.data_ptr(),
                self.storage,
                *piece.shape,
                first_row + start,
                self.blocks.data_ptr(),
            )

    def _put(
        self, address: int, number: int, shape: tuple[int, ...], order: int | None, first_row: int
    ) -> None:
        self._library.long["pp_pack_blocks"](
            address, number, *shape, order, self.storage, first_row, self.blocks.data_ptr()
        )

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Dequantized rows float32 [len(index), K]; `index` is int64."""
        out = torch.empty(index.numel(), self.shape[1])
        functions = self._library.functions(index.numel())
        functions["pp_dequantize"](
            self.blocks.data_ptr(),
            self.storage,
            *self.shape,
            index.data_ptr(),
            index.numel(),
            out.data_ptr(),
        )
        return out

    def dequantized(self) -> torch.Tensor:
        """The whole matrix float32 [N, K]."""
        return self.rows(torch.arange(self.shape[0]))

    def pieces(self) -> Iterator[torch.Tensor]:
        """The same some rows at a time, float32, PIECE_NUMBERS or a little more each."""
        for index in torch.arange(self.shape[0]).split(-(-PIECE_NUMBERS // self.shape[1])):
            yield self.rows(index)

    def multiply(self, x_RK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
        """x W^T + bias: float32 [R, K] -> [R, N]. The last axis of x must be contiguous."""
        rows, given = x_RK.shape[0], self._arguments(x_RK, bias_N)
        out = torch.empty(rows, self.shape[0])
        if rows:
            self._library.functions(rows)["pp_linear"](*given, None, out.data_ptr())
        return out

    def multiply_best(
        self, x_RK: torch.Tensor, bias_N: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same [R, N], and int64 [R]: the index of each row's largest output, the first of
        equals or of NaNs, found while the outputs are in caches.
        """
        rows, given = x_RK.shape[0], self._arguments(x_RK, bias_N)
        out, best = torch.empty(rows, self.shape[0]), torch.empty(rows, dtype=torch.int64)
        if rows:
            functions = self._library.functions(rows)
            functions["pp_linear_best"](*given, out.data_ptr(), best.data_ptr())
        return out, best

    def _arguments(self, x_RK: torch.Tensor, bias_N: torch.Tensor | None) -> tuple[int | None, ...]:
        """What both kernels are given first."""
        assert x_RK.dtype == torch.float32, "float32 rows are needed"
        assert x_RK.stride(1) == 1 or x_RK.shape[1] == 1 or not x_RK.numel(), "rows are contiguous"
        bias = None if bias_N is None else bias_N.data_ptr()
        blocks = self.blocks.data_ptr()
        return (
            x_RK.data_ptr(),
            x_RK.stride(0),
            x_RK.shape[0],
            blocks,
            self.storage,
            *self.shape,
            bias,
        )


def multiply_twin(
    x_RK: torch.Tensor, packed: PackedMatrix, bias_N: torch.Tensor | None
) -> torch.Tensor:
    """What `multiply` computes, in torch: the same rounding of activations, sums in float64."""
    weights = packed.dequantized().double()
    if packed.storage in FLOATS.values():
        plain = x_RK.double() @ weights.T
        return (plain if bias_N is None else plain + bias_N.double()).float()
    rows, inputs = x_RK.shape
    padded = -(-inputs // GROUP) * GROUP
    x = torch.nn.functional.pad(x_RK, (0, padded - inputs)).view(rows, -1, GROUP)
    largest = x.abs().amax(-1, keepdim=True)
    scale = largest / 127.0
    # The kernel's own steps, so that ties fall to the same side; 127.0 / tensor is none of them,
    # since torch multiplies by a reciprocal there.
    inverse = torch.full_like(largest, 127.0) / largest
    rounded = (x * torch.where(largest > 0, inverse, torch.zeros_like(largest))).round()
    restored = (rounded * scale).double().view(rows, padded)[:, :inputs]
    out = restored @ weights.T
    return (out if bias_N is None else out + bias_N.double()).float()


def stack_shapes(shapes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Shape of matrices put one above the other."""
    assert len({k for _, k in shapes}) == 1, "stacked matrices have equal inputs"
    return sum(n for n, _ in shapes), shapes[0][1]
