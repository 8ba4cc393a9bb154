"""GGUF's types in native matrices: kept where our storage can hold them, else rounded within the
errors that stand here.
"""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import quants

from polypath.kernels.cpu.library import Library
from polypath.kernels.cpu.packed import (
    INT4,
    INT4_SYMMETRIC,
    INT8,
    STORED_TYPES,
    PackedMatrix,
    StoredBlocks,
)
from polypath.runtime.checkpoint.gguf_file import BLOCKS, TYPE_NAMES
from polypath.runtime.planning.quantization import NATIVE_BYTES, STORED_BITS
from polypath.tests import k_quantizers

BOUNDS = {
    "Q4_0": 0.0,
    "Q4_1": 0.0,
    "Q5_0": 0.0,
    "Q8_0": 0.0,
    "Q4_K": 7e-4,  # scale and offset of a group in half precision
    "Q5_1": 6e-3,  # 8 bits with one scale for 32: below a tenth of what the type itself rounds
    "Q5_K": 6e-3,
    "Q6_K": 6e-3,
}
"""Root mean square error of a type in its native storage, relative to the weights."""


def make(kind: str, weights: np.ndarray) -> np.ndarray:
    if kind in k_quantizers.SIZES:
        return k_quantizers.quantize(weights, kind)
    return quants.quantize(weights, gguf.GGMLQuantizationType[kind]).view(np.uint8)


def floats(raw: np.ndarray, kind: str) -> torch.Tensor:
    return torch.from_numpy(quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))


def put(
    library: Library, raw: np.ndarray, kind: str, storage: int | None = None, **place: object
) -> torch.Tensor:
    """The rows of a matrix of such blocks, dequantized."""
    weights, size = BLOCKS[kind]
    shape = (raw.shape[0], raw.shape[1] // size * weights)
    matrix = PackedMatrix(library, storage or STORED_TYPES[kind][1], shape)
    blocks = StoredBlocks(data=raw.reshape(-1), type=kind, shape=shape, **place)  # pyright: ignore[reportArgumentType]
    matrix.put_stored(blocks, 0)
    return matrix.dequantized()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", BOUNDS)
def test_each_type_keeps_its_precision(library: Library, kind: str) -> None:
    weights = np.random.default_rng(0).standard_normal((40, 512)).astype(np.float32)
    raw = make(kind, weights)
    expected = floats(raw, kind)
    found = error(put(library, raw, kind), expected)
    of_type = error(expected, torch.from_numpy(weights))
    print(f"{kind}: {found:.2e} by us, {of_type:.2e} by the type")
    assert found <= BOUNDS[kind] and found < of_type / 4
    order = np.random.default_rng(1).permutation(40).astype(np.int32)
    shuffled = put(library, raw, kind, row_order=order)
    assert torch.equal(shuffled, put(library, raw, kind)[torch.from_numpy(order).long()])


@pytest.mark.parametrize("kind", k_quantizers.SIZES)
@pytest.mark.parametrize("seed", range(3))
def test_any_bytes_are_read_as_the_gguf_package_reads_them(
    library: Library, kind: str, seed: int
) -> None:
    raw = k_quantizers.random_blocks(kind, 12, 768, seed)
    assert error(put(library, raw, kind), floats(raw, kind)) < 6e-3


@pytest.mark.parametrize("kind", k_quantizers.SIZES)
@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
def test_extreme_blocks(library: Library, kind: str, byte: int) -> None:
    """All scales, offsets and weights at one end of their range."""
    raw = np.full((8, k_quantizers.SIZES[kind]), byte, dtype=np.uint8)
    for at in (208,) if kind == "Q6_K" else (0, 2):
        raw[:, at : at + 2] = np.float16(0.01).reshape(1).view(np.uint8)
    expected = floats(raw, kind)
    found = put(library, raw, kind)
    assert float((found - expected).abs().max()) <= 5e-3 * float(expected.abs().max())


def test_blocks_without_scale_are_zero(library: Library) -> None:
    for kind, size in k_quantizers.SIZES.items():
        raw = np.full((8, size), 0xFF, dtype=np.uint8)
        for at in (208,) if kind == "Q6_K" else (0, 2):
            raw[:, at : at + 2] = 0
        assert not put(library, raw, kind).any()


@pytest.mark.parametrize("kind", BOUNDS)
def test_any_type_can_be_rounded_to_4_bits(library: Library, kind: str) -> None:
    weights = np.random.default_rng(2).standard_normal((24, 256)).astype(np.float32)
    raw = make(kind, weights)
    bound = 0.08 if STORED_TYPES[kind][1] == INT8 else BOUNDS[kind]
    assert error(put(library, raw, kind, INT4), floats(raw, kind)) <= bound


@pytest.mark.parametrize("kind", BOUNDS)
def test_any_type_can_be_rounded_to_8_bits(library: Library, kind: str) -> None:
    raw = make(kind, np.random.default_rng(3).standard_normal((24, 256)).astype(np.float32))
    assert error(put(library, raw, kind, INT8), floats(raw, kind)) <= 6e-3


def test_tables_of_types_agree() -> None:
    for kind, (number, storage) in STORED_TYPES.items():
        ours, theirs = NATIVE_BYTES[kind]
        weights, size = BLOCKS[kind]
        assert TYPE_NAMES[number] == kind and theirs == size
        assert ours == weights // 32 * {INT4: 20, INT4_SYMMETRIC: 18, INT8: 34}[storage]
        assert (STORED_BITS[kind] > 4) == (storage == INT8)
    assert set(STORED_TYPES) == set(NATIVE_BYTES) == set(BOUNDS)
