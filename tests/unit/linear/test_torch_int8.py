"""torch's 8-bit linear layers against their twin in float64: shapes, extremes, neighbours, NaN."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polypath.runtime.linear.torch_int8 import CAPABILITY, TorchInt8Linear, TorchInt8Method
from polypath.runtime.planning.hardware import load_hardware

pytestmark = pytest.mark.skipif(
    not set(CAPABILITY.required_isa) <= set(load_hardware("this").cpu.isa), reason="no AVX2 here"
)
SAME = settings(deadline=None, max_examples=40)


@pytest.fixture(autouse=True)
def fbgemm() -> None:
    """The engine that `build` sets."""
    torch.backends.quantized.engine = "fbgemm"


def twin(x: torch.Tensor, layer: TorchInt8Linear) -> torch.Tensor:
    """The same weights, activations not rounded."""
    out = x.double() @ layer.dequantized().double().T
    return (out if layer.bias is None else out + layer.bias.double()).float()


@SAME
@given(
    rows=st.integers(0, 21),
    outputs=st.integers(1, 70),
    inputs=st.integers(1, 200),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_its_twin(rows: int, outputs: int, inputs: int, has_bias: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(outputs, inputs, generator=generator)
    bias = torch.randn(outputs, generator=generator) if has_bias else None
    layer = TorchInt8Linear(weights, bias)
    x = torch.randn(rows, inputs, generator=generator) * 3
    x[:, 0] *= 50  # an outlier, as activations have
    found = layer(x)
    assert found.shape == (rows, outputs)
    if rows:
        scale = float(x.abs().amax() * weights.abs().amax()) * inputs**0.5
        assert float((found - twin(x, layer)).abs().max()) < 3e-4 * scale


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("x_sign", [-1.0, 1.0])
def test_extremes_do_not_saturate(sign: float, x_sign: float) -> None:
    layer = TorchInt8Linear(torch.full((16, 256), sign), None)
    found = layer(torch.full((5, 256), 127 * x_sign))
    assert torch.allclose(found, torch.full((5, 16), 256 * 127 * sign * x_sign), rtol=1e-5)


@SAME
@given(seed=st.integers(0, 2**31), inputs=st.integers(1, 100))
def test_a_row_does_not_depend_on_its_neighbours(seed: int, inputs: int) -> None:
    assert CAPABILITY.batch_invariant
    generator = torch.Generator().manual_seed(seed)
    layer = TorchInt8Linear(torch.randn(48, inputs, generator=generator), None)
    x = torch.randn(13, inputs, generator=generator) * torch.logspace(-4, 4, 13)[:, None]
    whole = layer(x)
    for row in range(13):
        assert torch.equal(layer(x[row : row + 1])[0], whole[row])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_row(bad: float) -> None:
    layer = TorchInt8Linear(torch.randn(16, 96), torch.randn(16))
    x = torch.randn(6, 96)
    clean = layer(x)
    x[2, 40] = bad
    found, kept = layer(x), [0, 1, 3, 4, 5]
    assert found[2].isnan().all() and torch.equal(found[kept], clean[kept])


def test_rows_of_zeros_give_the_bias() -> None:
    layer = TorchInt8Linear(torch.randn(16, 96), torch.arange(16.0))
    assert torch.equal(layer(torch.zeros(2, 96)), torch.arange(16.0).repeat(2, 1))


def test_a_zero_weight_row_stays_zero() -> None:
    weights = torch.randn(4, 32)
    weights[1] = 0
    layer = TorchInt8Linear(weights, None)
    assert not layer.dequantized()[1].any() and not layer(torch.randn(3, 32))[:, 1].any()


def test_an_embedding_is_looked_up_and_multiplied_by_the_same_weights() -> None:
    weights = torch.randn(50, 64)
    method = TorchInt8Method()
    tied = method.pack_embedding(weights, is_head=True)
    index = torch.tensor([3, 49, 3])
    assert torch.equal(tied.rows(index), tied.dequantized()[index])
    head = method.pack_head(weights)
    assert torch.equal(head.dequantized(), tied.dequantized())
    assert torch.equal(head.rows(index), tied.rows(index))
    x = torch.randn(3, 64)
    assert torch.equal(head(x), tied(x))
    alone = method.pack_embedding(weights, is_head=False)
    assert (alone.num_bytes, head.num_bytes, tied.num_bytes) == (3400, 3400, 6600)


def test_parts_are_stacked_with_their_biases() -> None:
    parts = [torch.randn(4, 32), torch.randn(6, 32)]
    layer = TorchInt8Method().pack(list(parts), [torch.zeros(4), torch.ones(6)])
    assert float((layer.dequantized() - torch.cat(parts)).abs().max()) < 0.02
    assert layer.bias is not None and layer.bias.tolist() == [0.0] * 4 + [1.0] * 6


def test_torch_does_not_warn_those_who_serve() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        TorchInt8Linear(torch.randn(8, 32), None).dequantized()
    assert not caught
