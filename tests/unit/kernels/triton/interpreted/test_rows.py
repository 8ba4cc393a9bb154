"""Kernels over rows equal their torch twins: norms, gate, argmax."""

from __future__ import annotations

import pytest
import torch

from polypath.kernels import rms_norm as norm_twin
from polypath.kernels import silu_mul as gate_twin
from polypath.kernels.triton.argmax import argmax
from polypath.kernels.triton.rms_norm import add_rms_norm, rms_norm
from polypath.kernels.triton.silu_mul import silu_mul

# The interpreter cuts bfloat16 off where a GPU rounds, so it may differ by a step of each rounding.
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 3e-2}
DTYPES = list(BOUNDS)


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(found: torch.Tensor, wanted: torch.Tensor) -> None:
    bound = BOUNDS[wanted.dtype]
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 96, 576])
def test_rms_norm(size: int, dtype: torch.dtype) -> None:
    x, weight = noise(3, size, dtype=dtype), noise(size, dtype=dtype, seed=1)
    check(rms_norm(x, weight, 1e-5), norm_twin.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm_of_strided_rows(dtype: torch.dtype) -> None:
    x, residual = noise(4, 300, dtype=dtype)[:, 7:247], noise(4, 480, dtype=dtype, seed=1)[:, ::2]
    residual = residual.contiguous()
    weight = noise(240, dtype=dtype, seed=2)
    found, wanted = (f(x, residual, weight, 1e-6) for f in (add_rms_norm, norm_twin.add_rms_norm))
    check(found[0], wanted[0])
    check(found[1], wanted[1])


def test_a_row_of_nan_reaches_no_other_row() -> None:
    x, weight = noise(3, 64, dtype=torch.float32), torch.ones(64)
    x[1] = float("nan")
    found = rms_norm(x, weight, 1e-5)
    assert found[1].isnan().all() and found[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [3, 1100])
def test_silu_mul_of_strided_rows(size: int, dtype: torch.dtype) -> None:
    gate_up = (4 * noise(2, 2 * size + 5, dtype=dtype))[:, 5:]
    check(silu_mul(gate_up), gate_twin.silu_mul(gate_up))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_silu_of_what_overflows_is_zero_or_the_input() -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 0.0, 1.0, 2.0, 3.0]])
    assert silu_mul(gate_up).tolist() == [[0.0, 2e4, 0.0]]


@pytest.mark.parametrize("size", [1, 257, 4096, 9001])
def test_argmax_of_random_rows(size: int) -> None:
    x = noise(3, size + 2, dtype=torch.float32)[:, 2:]
    assert torch.equal(argmax(x), x.argmax(dim=-1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_argmax_takes_the_first_of_equals_across_parts(dtype: torch.dtype) -> None:
    x = torch.full((4, 9000), -7.0, dtype=dtype)
    x[0, [4100, 8999]] = 3.0
    x[1, [17, 4095, 4096]] = -1.0
    x[2] = float("-inf")
    x[3, 1:] = -0.0
    x[3, 0] = -1.0
    x[3, 4500] = 0.0
    assert argmax(x).tolist() == [4100, 17, 0, 1]


def test_argmax_finds_a_nan_as_torch_does() -> None:
    x = noise(3, 5000, dtype=torch.float32)
    x[0, 4990] = float("nan")
    x[1, 8] = float("inf")
    x[2, 30] = -torch.tensor(float("nan"))
    x[2, 31] = float("nan")
    assert argmax(x).tolist() == x.argmax(dim=-1).tolist() == [4990, 8, 30]
