"""The likeliest of each row, against torch's own max."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polypath.kernels.row_max import row_max, row_max_twin


def _assert_same(values: Tensor) -> None:
    (best, index), (best_twin, index_twin) = row_max(values), row_max_twin(values)
    assert index.dtype == torch.int64
    assert index.tolist() == index_twin.tolist()
    assert torch.equal(best.nan_to_num(nan=1e30), best_twin.nan_to_num(nan=1e30))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 5),
    width=st.sampled_from([1, 7, 64, 1003]),
    levels=st.sampled_from([1, 3, 1000]),
)
def test_equals_the_twin_with_and_without_ties(
    seed: int, rows: int, width: int, levels: int
) -> None:
    values = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    _assert_same((values * levels).round() / levels)


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [[0], [999], [3, 500]])
def test_equals_the_twin_on_values_that_are_no_numbers(odd: float, at: list[int]) -> None:
    values = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    values[1, at] = odd
    _assert_same(values)
    _assert_same(torch.full((2, 1000), odd))


def test_takes_a_view_whose_rows_are_one() -> None:
    _assert_same(torch.arange(10.0).expand(4, -1))
