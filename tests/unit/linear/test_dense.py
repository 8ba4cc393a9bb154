"""Plain weights on a card: products are summed in float32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from polypath.runtime.build_context import BuildContext
from polypath.runtime.linear.dense import build
from polypath.tests.unit.planning.public_models import public_model

MATMUL = torch.backends.cuda.matmul
HALF_SUMS = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


@pytest.fixture(autouse=True)
def as_torch_has_it() -> Iterator[None]:
    before = [getattr(MATMUL, name) for name in HALF_SUMS]
    for name in HALF_SUMS:
        setattr(MATMUL, name, True)
    yield
    for name, value in zip(HALF_SUMS, before, strict=True):
        setattr(MATMUL, name, value)


@pytest.mark.parametrize(("device", "stays"), [("cpu", True), ("cuda", False)])
def test_parts_of_a_product_are_not_summed_in_half_precision(device: str, stays: bool) -> None:
    model = public_model("Qwen3-0.6B")
    build(BuildContext(model=model, dtype=torch.float16, device=torch.device(device)))
    assert [getattr(MATMUL, name) for name in HALF_SUMS] == [stays, stays]
