"""Filtered drawing from integer weights, against a plain sorted float64 twin."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polypath.kernels.draw import (
    draw,
    draw_filtered,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    weigh,
)
from polypath.kernels.draw_row import RowDraw

_VOCAB = 1000


def _logits(seed: int, *, spread: float = 3.0, rows: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, _VOCAB, generator=generator) * spread


def _weights(logits: Tensor, temperature: float = 1.0) -> Tensor:
    temperatures = torch.full((len(logits),), temperature, dtype=torch.float64)
    return weigh(logits, logits.max(dim=1).values, temperatures)


def _kept(weights: Tensor) -> set[int]:
    return set(weights[0].nonzero().flatten().tolist())


def _plain_top_p(logits: Tensor, top_p: float) -> set[int]:
    """The twin: sort, add up, cut."""
    probability, ids = logits[0].double().softmax(dim=0).sort(descending=True)
    before = probability.cumsum(dim=0) - probability
    return set(ids[before < top_p].tolist())


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), top_p=st.floats(0.01, 0.99), spread=st.floats(0.1, 6.0))
def test_top_p_keeps_what_a_sorted_sum_keeps(seed: int, top_p: float, spread: float) -> None:
    logits = _logits(seed, spread=spread)
    ours, plain = _kept(keep_top_p(_weights(logits), [top_p])), _plain_top_p(logits, top_p)
    differing = logits[0].double().softmax(dim=0)[sorted(ours ^ plain)].sum().item()
    assert differing <= 2 * _VOCAB * 2.0**-30 + logits[0].double().softmax(dim=0).max() * 2.0**-28


@pytest.mark.parametrize("top_k", [1, 2, 50, 999])
def test_top_k_keeps_the_k_heaviest(top_k: int) -> None:
    logits = _logits(1, spread=1.0)
    kept = _kept(keep_top_k(_weights(logits), [top_k]))
    assert kept == set(logits[0].topk(top_k).indices.tolist())


@pytest.mark.parametrize("top_k", [0, _VOCAB, _VOCAB + 5])
def test_top_k_of_none_or_more_than_there_are_keeps_all(top_k: int) -> None:
    weights = _weights(_logits(1))
    assert torch.equal(keep_top_k(weights, [top_k]), weights)


def test_min_p_is_relative_to_the_likeliest() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.0625]]).log()
    assert _kept(keep_min_p(_weights(logits), [0.2])) == {0, 1, 2}
    assert _kept(keep_min_p(_weights(logits), [1.0])) == {0}


def test_equal_tokens_stay_or_go_together() -> None:
    logits = torch.zeros(1, 8)
    logits[0, 3] = 1.0
    assert len(_kept(keep_top_k(_weights(logits), [2]))) == 8
    assert len(_kept(keep_top_p(_weights(logits), [0.5]))) == 8


def test_filters_leave_other_rows_alone() -> None:
    weights = _weights(_logits(2, rows=3))
    for filtered in (
        keep_top_k(weights, [0, 5, 0]),
        keep_top_p(weights, [1.0, 0.5, 1.0]),
        keep_min_p(weights, [0.0, 0.5, 0.0]),
    ):
        assert torch.equal(filtered[[0, 2]], weights[[0, 2]])
        assert not torch.equal(filtered[1], weights[1])


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10_000), noise=st.floats(0.0, 1.0, exclude_max=True))
def test_never_draws_a_token_of_weight_zero(seed: int, noise: float) -> None:
    weights = keep_top_k(_weights(_logits(seed)), [3])
    token = draw(weights, torch.tensor([noise], dtype=torch.float64))
    assert weights[0, token] > 0


def test_the_ends_of_the_noise_give_the_first_and_last_kept_token() -> None:
    weights = torch.tensor([[0, 5, 0, 7, 0]] * 2)
    noise = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)
    assert draw(weights, noise).tolist() == [1, 3]


def test_follows_the_inverse_of_the_cumulated_distribution() -> None:
    weights = torch.tensor([[1, 2, 3, 4]]).repeat(10, 1)
    noise = torch.arange(10, dtype=torch.float64) / 10 + 0.05
    assert draw(weights, noise).tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]


@pytest.mark.parametrize("temperature", [1e-320, 1e-6, 100.0])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    weights = _weights(_logits(3), temperature)
    assert weights.min() >= 0
    assert weights.max() == 2**30 - 1


def test_masked_tokens_weigh_nothing() -> None:
    logits = _logits(4)
    logits[0, :990] = -torch.inf
    assert _kept(_weights(logits)) <= set(range(990, _VOCAB))


def _both(
    logits: Tensor, noise: float, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[int, int]:
    """The token of the short way and of its plain twin."""
    best = logits.max(dim=1).values
    short = RowDraw(logits.shape[1]).draw(
        logits[0].numpy(), float(best), temperature, noise, top_k=top_k, top_p=top_p, min_p=min_p
    )
    plain = draw_filtered(
        logits,
        best,
        torch.tensor([temperature], dtype=torch.float64),
        torch.tensor([noise], dtype=torch.float64),
        top_k_R=[top_k],
        top_p_R=[top_p],
        min_p_R=[min_p],
    )
    return short, int(plain)


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    noise=st.floats(0.0, 1.0, exclude_max=True),
    spread=st.sampled_from([0.0, 1e-7, 0.01, 1.0, 3.0, 8.0, 40.0]),
    temperature=st.sampled_from([1e-320, 1e-9, 1e-3, 0.3, 0.8, 1.0, 2.0, 100.0]),
    top_k=st.sampled_from([0, 1, 7, 255, _VOCAB - 1, _VOCAB, _VOCAB + 1]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-9]),
    min_p=st.sampled_from([0.0, 1e-12, 1e-9, 0.05, 1.0]),
    levels=st.sampled_from([4, 1000]),
    masked=st.sampled_from([0, 1, 900]),
)
def test_one_row_draws_what_its_plain_twin_draws(
    seed: int,
    noise: float,
    spread: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    levels: int,
    masked: int,
) -> None:
    logits = _logits(seed, spread=spread)
    logits = (logits * levels).round() / levels  # few levels: many ties
    logits[0, _VOCAB - masked :] = -torch.inf
    short, plain = _both(
        logits, noise, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    assert short == plain


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    noise=st.floats(0.0, 1.0, exclude_max=True),
    spread=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    top_k=st.sampled_from([0, 50, 20_000]),
    top_p=st.sampled_from([1.0, 0.9, 0.1]),
    min_p=st.sampled_from([0.0, 0.02]),
)
def test_one_row_of_a_large_vocabulary_draws_what_its_plain_twin_draws(
    seed: int, noise: float, spread: float, top_k: int, top_p: float, min_p: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 49_157, generator=generator) * spread
    short, plain = _both(logits, noise, temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p)
    assert short == plain


@pytest.mark.parametrize("noise", [0.0, 1.0 - 2.0**-53])
@pytest.mark.parametrize("top_k", [0, 3])
def test_one_row_draws_its_first_and_last_token_at_the_ends_of_the_noise(
    noise: float, top_k: int
) -> None:
    logits = torch.full((1, _VOCAB), -100.0)
    logits[0, [5, 400, 990]] = 1.0
    short, plain = _both(logits, noise, temperature=1.0, top_k=top_k, top_p=1.0, min_p=0.0)
    assert short == plain == (5 if noise == 0.0 else 990)


def test_logits_that_differ_but_weigh_the_same_stay_together_under_top_k() -> None:
    logits = torch.full((1, _VOCAB), -30.0)
    logits[0, :4] = torch.tensor([0.0, -20.0, -20.00001, -20.0001])  # the last three weigh 2
    assert weigh(logits, logits[:, 0], torch.ones(1).double())[0, :5].tolist() == [
        *(2**30 - 1, 2, 2, 2, 0)
    ]
    noises = torch.linspace(1 - 1e-8, 1 - 2.0**-53, 50, dtype=torch.float64).tolist()
    tokens = [
        _both(logits, noise, temperature=1.0, top_k=2, top_p=1.0, min_p=0.0) for noise in noises
    ]
    assert all(short == plain for short, plain in tokens)
    assert {short for short, _ in tokens} == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [1e-3, 0.7, 1.0, 100.0])
def test_one_row_weighs_as_its_plain_twin_in_the_last_bit(temperature: float) -> None:
    """A draw shows such an error once in a million, so draws alone would not tell."""
    logits = _logits(7)
    found = RowDraw(_VOCAB)._weigh(logits[0].numpy(), float(logits.max()), temperature)
    assert found.tolist() == _weights(logits, temperature)[0].tolist()


def test_an_exponential_does_not_depend_on_its_neighbours() -> None:
    """Weights of a part of a row must be those of the whole row, in the last bit."""
    scores = -22 * torch.rand(3000, generator=torch.Generator().manual_seed(0)).double()
    whole = scores.exp()
    for start in range(0, 64):
        for length in (1, 3, 8, 17, 250):
            part = slice(start, start + length)
            assert torch.equal(scores[part].clone().exp(), whole[part])
