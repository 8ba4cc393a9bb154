"""Quantized linear layers: against their torch twin over odd shapes, at integer extremes, and
beside NaN.
"""

from __future__ import annotations

from pathlib import Path

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
    PackedMatrix,
    StoredBlocks,
    multiply_twin,
)
from polypath.runtime.checkpoint.source import open_checkpoint

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
        again, best = matrix.multiply_best(x, bias)
        assert torch.equal(again, found) and torch.equal(best, found.argmax(dim=-1))


@pytest.mark.parametrize("storage", [INT4, INT8, *FLOATS.values()])
def test_the_largest_output_is_the_first_of_equals_or_of_nans(
    library: Library, storage: int
) -> None:
    library.quick["pp_set_threads"](2)
    weights = torch.ones(5000, 64)
    matrix, x, bias = packed(library, storage, weights), torch.ones(40, 64), torch.zeros(5000)
    assert matrix.multiply_best(x, None)[1].tolist() == [0] * 40
    bias[[4990, 3001]] = 5.0
    assert matrix.multiply_best(x, bias)[1].tolist() == [3001] * 40
    bias[[4995, 4999]] = float("nan")
    assert matrix.multiply_best(x, bias)[1].tolist() == [4995] * 40
    x[7] = float("inf")
    found = matrix.multiply_best(x, None)[1].tolist()
    assert found == [0] * 40, "an infinite row is NaN or infinite everywhere"
    assert matrix.multiply_best(x[:0], None)[1].shape == (0,)


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


@pytest.mark.parametrize("storage", [INT4, INT8, *FLOATS.values()])
@pytest.mark.parametrize("rows", [5, 15, 16, 19, 131])
def test_many_rows_are_what_each_is_alone(library: Library, rows: int, storage: int) -> None:
    """Rows past a tile, past the tokens of one chunk, and inputs past one slab of groups."""
    matrix = packed(library, storage, torch.randn(45, 1000))
    x, bias = torch.randn(rows, 1000), torch.randn(45)
    whole = matrix.multiply(x, bias)
    twin = multiply_twin(x, matrix, bias)  # one input rounded the other way would give over 5e-5
    assert float((whole - twin).norm() / twin.norm()) < 1e-5
    for row in {0, 3, rows // 2, rows - 2, rows - 1}:
        assert torch.equal(matrix.multiply(x[row : row + 1], bias)[0], whole[row])


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_extremes_of_stored_4_bit_weights_do_not_saturate(library: Library, rows: int) -> None:
    raw = np.full((32 * 30, 20), 0xFF, dtype=np.uint8)  # every weight 15
    raw[:, :2] = np.frombuffer(np.float16(1.0).tobytes(), dtype=np.uint8)
    raw[:, 2:4] = 0  # no offset
    matrix = PackedMatrix(library, INT4, (32, 32 * 30))
    matrix.put_stored(StoredBlocks(data=raw.reshape(-1), type="Q4_1", shape=(32, 32 * 30)), 0)
    for sign in (-1.0, 1.0):
        found = matrix.multiply(torch.full((rows, 32 * 30), sign), None)
        assert torch.allclose(found, torch.full((rows, 32), sign * 15 * 32 * 30))


def test_a_strided_view_is_read_right(library: Library) -> None:
    matrix = packed(library, INT4, torch.randn(24, 64))
    wide = torch.randn(4, 200)
    view = wide[:, 3:67]
    assert torch.equal(matrix.multiply(view, None), matrix.multiply(view.contiguous(), None))


def test_stored_blocks_lie_where_they_are_put(library: Library) -> None:
    gguf = pytest.importorskip("gguf")
    quants = pytest.importorskip("gguf.quants")
    weights = np.random.default_rng(0).standard_normal((20, 96)).astype(np.float32)
    raw = quants.quantize(weights, gguf.GGMLQuantizationType.Q4_1)
    expected = torch.from_numpy(quants.dequantize(raw, gguf.GGMLQuantizationType.Q4_1))
    order = np.arange(20, dtype=np.int32)[::-1].copy()
    matrix = PackedMatrix(library, INT4, (30, 96))
    stored = StoredBlocks(data=raw.reshape(-1).view(np.uint8), type="Q4_1", shape=(20, 96))
    matrix.put_stored(stored, 3)
    assert torch.equal(matrix.dequantized()[3:23], expected)
    reordered = StoredBlocks(data=stored.data, type="Q4_1", shape=(20, 96), row_order=order)
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


@pytest.mark.parametrize(("storage", "bound"), [(INT4, 0.072), (INT8, 0.0056)])
@pytest.mark.parametrize("dtype", list(FLOATS), ids=str)
def test_rounding_floats_stays_within_its_step(
    library: Library, storage: int, bound: float, dtype: torch.dtype
) -> None:
    weights = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = packed(library, storage, weights).dequantized()
    weights = weights.float()
    assert float((found - weights).norm() / weights.norm()) < bound
    assert torch.equal(found, packed(library, storage, weights).dequantized())


def between_extremes(weights: torch.Tensor) -> torch.Tensor:
    """4 bits with 15 steps from each group's smallest weight to its largest: no search."""
    groups = weights.reshape(-1, 32)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    step, base = ((high - low) / 15).half().float(), low.half().float()
    q = ((groups - base) / step.clamp_min(1e-30)).round().clamp(0, 15)
    return (q * step + base).reshape(weights.shape)


@pytest.mark.parametrize("kind", ["normal", "laplace", "uniform", "outlier", "offset", "grid"])
def test_the_search_rounds_better_than_the_extremes(library: Library, kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(32, 512, generator=generator)
    if kind == "laplace":
        weights = weights.abs().pow(1.5) * weights.sign()
    elif kind == "uniform":
        weights = torch.rand(32, 512, generator=generator) - 0.5
    elif kind == "outlier":
        weights[:, ::32] *= 20
    elif kind == "offset":
        weights = weights * 0.01 + 1.0
    elif kind == "grid":
        weights = (weights * 3).round().clamp(-7, 8) / 4
        weights[:, ::32], weights[:, 1::32] = -7 / 4, 8 / 4
    ours = (packed(library, INT4, weights).dequantized() - weights).square().sum()
    plain = (between_extremes(weights) - weights).square().sum()
    assert float(ours) <= {"grid": 1e-6}.get(kind, 0.95 * float(plain))


@pytest.mark.parametrize("value", [0.0, 1.0, -3.25, 6e-8, 60000.0])
def test_constant_weights_are_kept(library: Library, value: float) -> None:
    for storage in (INT4, INT8):
        found = packed(library, storage, torch.full((8, 64), value)).dequantized()
        assert float((found - value).abs().max()) <= 1e-3 * abs(value) + 6e-8


def test_the_default_models_embedding_is_rounded_better(
    library: Library, default_model_path: Path
) -> None:
    """Its float weights to 4 bits: 0.081 by the search, 0.090 between the extremes."""
    weights = open_checkpoint(str(default_model_path)).read("model.embed_tokens.weight")[:4096]
    found = packed(library, INT4, weights).dequantized()
    ours = float((found - weights).norm() / weights.norm())
    plain = float((between_extremes(weights) - weights).norm() / weights.norm())
    print(f"{ours:.4f} by the search, {plain:.4f} between the extremes")
    assert ours < 0.92 * plain
