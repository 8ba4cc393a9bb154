"""Pieces of a stored matrix, which the plain forward multiplies by: one above the other they are
the matrix.
"""

from __future__ import annotations

import pytest
import torch

from polypath.kernels.cpu import packed
from polypath.kernels.cpu.library import load
from polypath.kernels.cpu.packed import FLOATS, INT4, INT8, PackedMatrix
from polypath.kernels.cpu.variants import built_variants
from polypath.runtime.linear import torch_int8
from polypath.runtime.linear.dense import DenseLinear
from polypath.runtime.linear.method import Linear
from polypath.runtime.linear.native import NativeLinear, StackedLinear
from polypath.runtime.linear.torch_int8 import TorchInt8Linear

OUTPUTS, INPUTS = 100, 64
STORAGES = (INT4, INT8, *FLOATS.values())
NAMES = ["dense", "int8 packed", "int8 table", "stacked", *map(str, STORAGES)]


def native(storage: int, outputs: int = OUTPUTS) -> NativeLinear:
    if "portable" not in built_variants():
        pytest.skip("the native kernels are not built")
    matrix = PackedMatrix(load("portable"), storage, (outputs, INPUTS))
    matrix.put_floats(torch.randn(outputs, INPUTS), 0)
    return NativeLinear(matrix, None)


def layer_of(name: str) -> Linear:
    weights = torch.randn(OUTPUTS, INPUTS)
    match name:
        case "dense":
            return DenseLinear(weights, None)
        case "int8 packed" | "int8 table":
            return TorchInt8Linear(weights, None, is_table=name == "int8 table")
        case "stacked":
            parts = [native(INT4, 40), native(INT8, 24)]
            return StackedLinear(load("portable"), parts)
        case _:
            return native(int(name))


@pytest.mark.parametrize("name", NAMES)
def test_they_are_the_matrix(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "PIECE_NUMBERS", 16 * INPUTS + 5)
    monkeypatch.setattr(torch_int8, "PIECE_NUMBERS", 16 * INPUTS + 5)
    layer = layer_of(name)
    pieces = list(layer.pieces())
    assert torch.equal(torch.cat(pieces), layer.dequantized())
    if name != "dense":  # a copy of the whole would go to memory and back
        assert max(piece.shape[0] for piece in pieces) == 17


def test_a_matrix_of_wide_rows_has_a_row_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "PIECE_NUMBERS", INPUTS // 2)
    assert [len(piece) for piece in native(INT8, 3).pieces()] == [1, 1, 1]
