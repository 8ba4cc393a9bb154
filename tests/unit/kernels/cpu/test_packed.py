"""Quantized linear layers: against their torch twin over odd shapes, at integer extremes, and
beside NaN.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polypath.kernels.cpu.library import Library
from polypath.kernels.cpu.packed import (
    FLOATS,
    INT4,
    INT8,
    STORED_TYPES,
    PackedMatrix,
    StoredBlocks,
    multiply_twin,
)

SAME = settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def packed(library: Library, storage: int, weights: torch.Tensor) -> PackedMatrix:
    rows, inputs = weights.shape
    matrix = PackedMatrix(library, storage, (rows, inputs))
    matrix.put_floats(weights, 0)
    return matrix


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    scale = expected.abs().max().clamp_min(1e-6)
    assert float((found - expected).abs().max() / scale) < 1e-4


@SAME
@given(
    rows=st.integers(0, 21),
    outputs=st.integers(1, 70),
    inputs=st.integers(1, 200),
    storage=st.sampled_from([INT4, INT8, *FLOATS.values()]),
    has_bias=st.booleans(),
    threads=st.integers(1, 8),
    seed=st.integers(0, 2**31),
)
def test_equals_its_twin(
    library: Library,
    rows: int,
    outputs: int,
    inputs: int,
    storage: int,
    has_bias: bool,
    threads: int,
    seed: int,
) -> None:
    library.quick["pp_set_threads"](threads)
    generator = torch.Generator().manual_seed(seed)
    matrix = packed(library, storage, torch.randn(outputs, inputs, generator=generator))
    x = torch.randn(rows, inputs, generator=generator) * 3
    bias = torch.randn(outputs, generator=generator) if has_bias else None
    found = matrix.multiply(x, bias)
    assert found.shape == (rows, outputs)
    if rows:
        assert_close(found, multiply_twin(x, matrix, bias))


@pytest.mark.parametrize("storage", [INT4, INT8])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_integer_extremes_do_not_saturate(library: Library, storage: int, sign: float) -> None:
    weights = torch.full((16, 256), sign)
    weights[:, ::32] = 0.0 if storage == INT4 else sign  # int4: a range from 0 to the extreme
    matrix = packed(library, storage, weights)
    for x_sign in (-1.0, 1.0):
        x = torch.full((5, 256), x_sign * 127.0)
        assert_close(matrix.multiply(x, None), multiply_twin(x, matrix, None))


def test_the_smallest_int8_is_multiplied_right(library: Library) -> None:
    raw = np.full((8, 34), 0x80, dtype=np.uint8)  # every weight -128
    raw[:, :2] = np.frombuffer(np.float16(0.5).tobytes(), dtype=np.uint8)
    matrix = PackedMatrix(library, INT8, (8, 32))
    matrix.put_stored(StoredBlocks(data=raw.reshape(-1), type="Q8_0", shape=(8, 32)), 0)
    x = torch.full((3, 32), -1.0)
    assert torch.allclose(matrix.multiply(x, None), torch.full((3, 8), 0.5 * 128 * 32))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_row(library: Library, bad: float) -> None:
    matrix = packed(library, INT4, torch.randn(16, 96))
    x = torch.randn(6, 96)
    clean = matrix.multiply(x, None)
    x[2, 40] = bad
    found = matrix.multiply(x, None)
    assert found[2].isnan().all()
    kept = [0, 1, 3, 4, 5]
    assert torch.equal(found[kept], clean[kept])


@SAME
@given(seed=st.integers(0, 2**31), storage=st.sampled_from([INT4, INT8, *FLOATS.values()]))
def test_a_row_does_not_depend_on_its_neighbours(library: Library, seed: int, storage: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrix = packed(library, storage, torch.randn(48, 64, generator=generator))
    x = torch.randn(13, 64, generator=generator)
    whole = matrix.multiply(x, None)
    for row in range(13):
        assert torch.equal(matrix.multiply(x[row : row + 1], None)[0], whole[row])


def test_a_strided_view_is_read_right(library: Library) -> None:
    matrix = packed(library, INT4, torch.randn(24, 64))
    wide = torch.randn(4, 200)
    view = wide[:, 3:67]
    assert torch.equal(matrix.multiply(view, None), matrix.multiply(view.contiguous(), None))


@pytest.mark.parametrize("kind", sorted(STORED_TYPES))
def test_stored_blocks_keep_every_weight(library: Library, kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    quants = pytest.importorskip("gguf.quants")
    weights = np.random.default_rng(0).standard_normal((20, 96)).astype(np.float32)
    raw = quants.quantize(weights, gguf.GGMLQuantizationType[kind])
    expected = torch.from_numpy(quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))
    _, storage, _ = STORED_TYPES[kind]
    order = np.arange(20, dtype=np.int32)[::-1].copy()
    matrix = PackedMatrix(library, storage, (30, 96))
    stored = StoredBlocks(data=raw.reshape(-1).view(np.uint8), type=kind, shape=(20, 96))
    matrix.put_stored(stored, 3)
    assert torch.equal(matrix.dequantized()[3:23], expected)
    reordered = StoredBlocks(data=stored.data, type=kind, shape=(20, 96), row_order=order)
    matrix.put_stored(reordered, 10)
    assert torch.equal(matrix.dequantized()[10:30], expected.flip(0))


@pytest.mark.parametrize("dtype", list(FLOATS), ids=str)
def test_float_storages_keep_every_weight(library: Library, dtype: torch.dtype) -> None:
    weights = torch.randn(37, 45).to(dtype)
    weights[0, :4] = torch.tensor([float("inf"), 0.0, -0.0, 6e-8], dtype=dtype)
    matrix = packed(library, FLOATS[dtype], weights)
    assert torch.equal(matrix.dequantized(), weights.float())
    assert matrix.num_bytes == 48 * 45 * dtype.itemsize


@pytest.mark.parametrize("storage", list(FLOATS.values()))
def test_nan_in_float_storages_stays_in_its_row(library: Library, storage: int) -> None:
    matrix = packed(library, storage, torch.randn(16, 40))
    x = torch.randn(7, 40)
    clean = matrix.multiply(x, None)
    x[3, 5] = float("nan")
    found = matrix.multiply(x, None)
    kept = [0, 1, 2, 4, 5, 6]
    assert found[3].isnan().all() and torch.equal(found[kept], clean[kept])


@pytest.mark.parametrize(("storage", "bound"), [(INT4, 0.09), (INT8, 0.007)])
def test_rounding_floats_stays_within_its_step(
    library: Library, storage: int, bound: float
) -> None:
    weights = torch.randn(64, 128)
    found = packed(library, storage, weights).dequantized()
    assert float((found - weights).norm() / weights.norm()) < bound
