"""Symmetric 4-bit blocks: without offsets, and bit for bit the products of blocks with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polypath.kernels.cpu.library import Library
from polypath.kernels.cpu.packed import INT4, INT4_SYMMETRIC, PackedMatrix, StoredBlocks
from polypath.runtime.checkpoint.dequantize import dequantize


def random_q4_0(outputs: int, inputs: int, seed: int) -> np.ndarray:
    """uint8 [outputs, bytes]: any 4 bits with scales of any size and sign, subnormal and 0 too."""
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (outputs * inputs // 32, 18), dtype=np.uint8)
    sizes = np.exp2(generator.uniform(-26.0, 6.0, len(blocks)))
    signs = generator.choice([-1.0, 1.0], len(blocks))
    blocks[:, :2] = (sizes * signs).astype(np.float16).reshape(-1, 1).view(np.uint8)
    return blocks.reshape(outputs, -1)


def put(
    library: Library, storage: int, raw: np.ndarray, order: np.ndarray | None = None
) -> PackedMatrix:
    shape = (raw.shape[0], raw.shape[1] // 18 * 32)
    matrix = PackedMatrix(library, storage, shape)
    matrix.put_stored(
        StoredBlocks(data=raw.reshape(-1), type="Q4_0", shape=shape, row_order=order), 0
    )
    return matrix


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (7, 64), (37, 96), (72, 800), (203, 160)])
def test_products_have_the_bits_of_blocks_with_offsets(
    library: Library, outputs: int, inputs: int
) -> None:
    library.quick["pp_set_threads"](2)
    raw = random_q4_0(outputs, inputs, outputs)
    symmetric, general = put(library, INT4_SYMMETRIC, raw), put(library, INT4, raw)
    generator = torch.Generator().manual_seed(inputs)
    x, bias = torch.randn(40, inputs, generator=generator), torch.randn(outputs)
    for rows in range(1, 41):
        found = symmetric.multiply(x[:rows], bias)
        assert torch.equal(bits(found), bits(general.multiply(x[:rows], bias))), rows
        best = symmetric.multiply_best(x[:rows], bias)[1]
        assert torch.equal(best, found.argmax(-1)), rows
        assert found.isfinite().all() and found.unique().numel() >= outputs


def test_rows_are_those_of_the_file(library: Library) -> None:
    raw = random_q4_0(45, 320, 0)
    order = np.random.default_rng(1).permutation(45).astype(np.int32)
    expected = dequantize(memoryview(raw.tobytes()), "Q4_0", (45, 320))
    found = put(library, INT4_SYMMETRIC, raw)
    assert torch.equal(found.dequantized(), expected)
    assert found.num_bytes == 48 * 320 // 32 * 18
    shuffled = put(library, INT4_SYMMETRIC, raw, order)
    assert torch.equal(shuffled.dequantized(), expected[torch.from_numpy(order).long()])
    index = torch.tensor([44, 0, 7, 8, 7])
    assert torch.equal(shuffled.rows(index), shuffled.dequantized()[index])


@pytest.mark.parametrize("rows", [1, 6, 40])
@pytest.mark.parametrize("scale", [8188.0, 65504.0, float("inf"), float("nan")])
def test_the_largest_scales_are_multiplied_right(library: Library, scale: float, rows: int) -> None:
    """-8 d is no half from 8192 on, where blocks with offsets would give infinities."""
    raw = np.full((9, 18), 0x2F, dtype=np.uint8)  # weights 7 d and -6 d
    raw[:, :2] = np.float16(scale).reshape(1).view(np.uint8)
    found = put(library, INT4_SYMMETRIC, raw).multiply(torch.ones(rows, 32), None)
    if not np.isfinite(scale):
        assert not found.isfinite().any()
        return
    assert torch.allclose(found, torch.full((rows, 9), 16 * scale * (7 - 6)), rtol=1e-5)
    same = put(library, INT4, raw).multiply(torch.ones(rows, 32), None)
    assert torch.equal(same, found) == (scale < 8192)


def test_weights_with_offsets_do_not_fit(library: Library) -> None:
    matrix = PackedMatrix(library, INT4_SYMMETRIC, (8, 32))
    blocks = StoredBlocks(data=np.zeros(160, dtype=np.uint8), type="Q4_1", shape=(8, 32))
    with pytest.raises(AssertionError, match="weights have offsets"):
        matrix.put_stored(blocks, 0)
    with pytest.raises(AssertionError, match="rounding to 4 bits finds offsets"):
        matrix.put_floats(torch.zeros(8, 32), 0)
