"""The sampler: every rule of a row, and that rows are blind to each other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polypath.kernels.philox import uniform
from polypath.runtime.device_sampler import DeviceSampler
from polypath.runtime.host_sampler import HostSampler
from polypath.runtime.logits import Logits
from polypath.runtime.logprobs import prompt_logprobs
from polypath.runtime.request import SamplingParams
from polypath.runtime.sampler import NoToken, Sampler, build_sampler

_VOCAB = 300
_EOS = 2


@dataclass(frozen=True, slots=True)
class _Row:
    """What the sampler reads of a request."""

    sampling: SamplingParams
    token_ids: list[int]
    num_prompt: int


def _row(
    prompt_ids: Sequence[int] = (5, 6, 7), output_ids: Sequence[int] = (), **params: object
) -> _Row:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return _Row(sampling, [*prompt_ids, *output_ids], len(prompt_ids))


def _logits(rows: int, seed: int = 0, spread: float = 2.0) -> Tensor:
    return torch.randn(rows, _VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def _sampler() -> Sampler:
    return build_sampler(_VOCAB, torch.device("cpu"), [_EOS])


def _tokens(logits: Tensor, rows: Sequence[_Row]) -> list[int]:
    return _sampler().sample(Logits(logits), rows).to_host()[0]


def _token(logits: Tensor, **params: object) -> int:
    return _tokens(logits, [_row(**params)])[0]  # type: ignore[arg-type]


_KINDS = [
    _row(temperature=0.0),
    _row(temperature=0.0, repetition_penalty=2.0),
    _row(temperature=0.0, output_ids=[9, 9, 11], frequency_penalty=2.0),
    _row(temperature=0.0, output_ids=[9, 9, 11], presence_penalty=-2.0),
    _row(seed=3, top_k=5),
    _row(seed=4, top_p=0.7, output_ids=[1, 2, 3]),
    _row(seed=5, min_p=0.05, temperature=2.0, logprobs=3),
    _row(seed=6, logit_bias={17: 4.0}, min_tokens=3),
    _row(seed=7, temperature=0.7, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.3),
]


def test_greedy_takes_the_likeliest() -> None:
    logits = _logits(4)
    assert _tokens(logits, [_row(temperature=0.0)] * 4) == logits.argmax(dim=1).tolist()


def test_leaves_the_logits_as_they_were() -> None:
    logits = _logits(len(_KINDS))
    before = logits.clone()
    _sampler().sample(Logits(logits), _KINDS)
    assert torch.equal(logits, before)


def test_a_row_is_the_same_alone_in_every_order_and_in_every_part_of_the_batch() -> None:
    logits = _logits(len(_KINDS))
    alone = [
        _sampler().sample(Logits(logits[i : i + 1]), [row]).to_host()
        for i, row in enumerate(_KINDS)
    ]
    orders = [*itertools.islice(itertools.permutations(range(len(_KINDS))), 0, 5000, 97)]
    parts = [
        part for size in (2, 3, 5) for part in itertools.combinations(range(len(_KINDS)), size)
    ]
    for order in (*orders, *parts[::3]):
        tokens, logprobs = (
            _sampler().sample(Logits(logits[list(order)]), [_KINDS[i] for i in order]).to_host()
        )
        assert tokens == [alone[i][0][0] for i in order]
        assert logprobs == [alone[i][1][0] for i in order]


def test_all_24_orders_of_four_neighbours_give_the_same_tokens() -> None:
    logits, rows = _logits(4), _KINDS[1:5]
    expected = [_tokens(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    for order in itertools.permutations(range(4)):
        assert _tokens(logits[list(order)], [rows[i] for i in order]) == [
            expected[i] for i in order
        ]


@pytest.mark.parametrize("vocab", [_VOCAB, 5000])
def test_rows_drawn_together_equal_rows_drawn_one_by_one(vocab: int) -> None:
    logits = torch.randn(len(_KINDS), vocab, generator=torch.Generator().manual_seed(0)) * 4
    one_by_one, together = HostSampler(vocab, [_EOS]), DeviceSampler(vocab, [_EOS])
    assert (
        together.sample(Logits(logits), _KINDS).to_host()
        == one_by_one.sample(Logits(logits), _KINDS).to_host()
    )


@pytest.mark.parametrize("kind", [HostSampler, DeviceSampler])
def test_what_the_forward_pass_found_changes_no_draw(
    kind: type[HostSampler] | type[DeviceSampler],
) -> None:
    logits = _logits(len(_KINDS))
    logits[1, 3] = float("nan")
    best, sampler = logits.argmax(dim=-1), kind(_VOCAB, [_EOS])
    for rows in (_KINDS, [_row(temperature=0.0)] * len(_KINDS)):
        plain, told = (
            sampler.sample(Logits(logits), rows),
            sampler.sample(Logits(logits, best), rows),
        )
        assert told.failed_rows() == plain.failed_rows() and 1 in plain.failed_rows()
        for found, expected in zip(told.to_host(), plain.to_host(), strict=True):
            assert found[:1] + found[2:] == expected[:1] + expected[2:]
    assert torch.equal(best, logits.argmax(dim=-1)), "it may lie in a graph's memory"


def test_greedy_rows_believe_the_forward_pass() -> None:
    rows, best = [_row(temperature=0.0)] * 2, torch.tensor([5, 7])
    for kind in (HostSampler, DeviceSampler):
        tokens, _ = kind(_VOCAB, [_EOS]).sample(Logits(_logits(2), best), rows).to_host()
        assert tokens == [5, 7], "else the largest were looked for twice"


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [HostSampler, DeviceSampler])
def test_a_broken_row_is_named_and_hurts_no_neighbour(
    poison: float, kind: type[HostSampler] | type[DeviceSampler]
) -> None:
    logits = _logits(len(_KINDS))
    sampler = kind(_VOCAB, [_EOS])
    good, good_logprobs = sampler.sample(Logits(logits), _KINDS).to_host()
    for broken in range(len(_KINDS)):
        poisoned = logits.clone()
        poisoned[broken, 100] = poison
        sampled = sampler.sample(Logits(poisoned), _KINDS)
        tokens, logprobs = sampled.to_host()
        assert sampled.failed_rows() == {broken: NoToken.NOT_FINITE}
        assert 0 <= tokens[broken] < _VOCAB
        for i in set(range(len(_KINDS))) - {broken}:
            assert (tokens[i], logprobs[i]) == (good[i], good_logprobs[i])


@pytest.mark.parametrize("kind", [HostSampler, DeviceSampler])
def test_a_row_without_any_finite_logit_is_bad_and_one_with_masked_tokens_is_not(
    kind: type[HostSampler] | type[DeviceSampler],
) -> None:
    logits = _logits(4)
    logits[[0, 1]] = -torch.inf
    logits[[2, 3], :250] = -torch.inf
    sampled = kind(_VOCAB, [_EOS]).sample(Logits(logits), [_row(), _row(temperature=0.0)] * 2)
    assert sampled.failed_rows() == dict.fromkeys([0, 1], NoToken.NOT_FINITE)
    assert all(0 <= token < _VOCAB for token in sampled.to_host()[0])
    assert all(token >= 250 for token in sampled.to_host()[0][2:])


@pytest.mark.parametrize("kind", [HostSampler, DeviceSampler])
def test_what_a_request_forbids_itself_is_told_from_damaged_logits(
    kind: type[HostSampler] | type[DeviceSampler],
) -> None:
    logits = _logits(4)
    logits[[1, 3], 7] = torch.nan
    forbids: dict[str, Any] = {"min_tokens": 1, "stop_token_ids": tuple(range(_VOCAB))}
    rows = [_row(**forbids), _row(**forbids), _row(logit_bias={7: 5.0}), _row()]
    assert kind(_VOCAB, [_EOS]).sample(Logits(logits), rows).failed_rows() == {
        0: NoToken.FORBIDDEN,
        1: NoToken.NOT_FINITE,
        3: NoToken.NOT_FINITE,
    }


def test_the_draw_is_the_inverse_of_the_distribution_at_the_noise_of_seed_choice_and_position() -> (
    None
):
    logits = _logits(1)
    cumulated = logits[0].double().softmax(dim=0).cumsum(dim=0)
    for seed, choice, position in itertools.product((0, 1, 2**64 - 1), (0, 1), (0, 1, 50)):
        expected = int(torch.searchsorted(cumulated, uniform(seed, choice, position), right=True))
        row = _row(output_ids=[1] * position, seed=seed, choice=choice)
        assert _tokens(logits, [row]) == [expected]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(-(2**63), 2**64))
def test_the_same_seed_repeats_and_minus_one_is_the_largest(seed: int) -> None:
    logits = _logits(1)
    assert _token(logits, seed=seed) == _token(logits, seed=seed % 2**64)


def test_draws_follow_the_distribution() -> None:
    logits = _logits(1, spread=1.0)
    num_draws = 4000
    counts = torch.zeros(_VOCAB)
    for seed in range(0, num_draws, 100):
        rows = [_row(seed=seed + i, temperature=0.8) for i in range(100)]
        tokens = torch.tensor(_tokens(logits.expand(100, -1), rows))
        counts += torch.bincount(tokens, minlength=_VOCAB)
    expected = (logits[0] / 0.8).softmax(dim=0) * num_draws
    chi_squared = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_squared < _VOCAB + 5 * (2 * _VOCAB) ** 0.5


def test_top_k_one_is_greedy_at_any_temperature() -> None:
    logits = _logits(1)
    assert _token(logits, temperature=100.0, top_k=1) == logits.argmax().item()


def test_top_p_counts_what_top_k_left() -> None:
    logits = torch.full((1, _VOCAB), -20.0)
    logits[0, :4] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    drawn = {_token(logits, seed=seed, top_k=2, top_p=0.55) for seed in range(50)}
    assert drawn == {0}  # 0.4 of 0.7 is 0.571


def test_repetition_divides_positive_and_multiplies_negative_logits_of_prompt_and_answer() -> None:
    logits = torch.full((1, _VOCAB), -9.0)
    logits[0, [10, 20, 30]] = torch.tensor([4.0, 3.0, 2.5])
    params = {"temperature": 0.0, "repetition_penalty": 2.0}
    assert _token(logits, prompt_ids=[10, 10], **params) == 20
    assert _token(logits, prompt_ids=[10], output_ids=[20], **params) == 30
    negative = torch.full((1, _VOCAB), -9.0)
    negative[0, [10, 20]] = torch.tensor([-2.0, -3.0])
    assert _token(negative, prompt_ids=[10], **params) == 20


def test_presence_and_frequency_look_at_the_answer_only() -> None:
    logits = torch.zeros(1, _VOCAB)
    logits[0, [10, 20]] = torch.tensor([3.0, 2.0])
    assert _token(logits, temperature=0.0, prompt_ids=[10] * 200, presence_penalty=2.0) == 10
    assert _token(logits, temperature=0.0, output_ids=[10], presence_penalty=2.0) == 20
    assert _token(logits, temperature=0.0, output_ids=[10], frequency_penalty=0.7) == 10
    assert _token(logits, temperature=0.0, output_ids=[10] * 2, frequency_penalty=0.7) == 20
    assert _token(logits, temperature=0.0, output_ids=[20] * 2, frequency_penalty=-0.7) == 20


def test_a_bias_of_100_wins_and_of_minus_100_loses() -> None:
    logits = _logits(1)
    likeliest = logits[0].topk(5).indices.tolist()
    assert _token(logits, seed=1, logit_bias={42: 100.0}, repetition_penalty=2.0) == 42
    banned = dict.fromkeys(likeliest, -100.0)
    assert all(_token(logits, seed=s, logit_bias=banned) not in banned for s in range(20))


def test_a_bias_on_a_token_that_does_not_exist_changes_nothing() -> None:
    logits = _logits(1)
    assert _token(logits, temperature=0.0, logit_bias={-1: 100.0, _VOCAB: 100.0}) == (
        _token(logits, temperature=0.0)
    )


def test_ends_wait_for_min_tokens() -> None:
    logits = _logits(1)
    logits[0, [_EOS, 33]] = torch.tensor([50.0, 49.0])
    params = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (33, _VOCAB + 7)}
    assert _token(logits, output_ids=[1], **params) not in (_EOS, 33)
    assert _token(logits, output_ids=[1, 1], **params) == _EOS


def test_logprobs_are_of_the_raw_distribution_with_rank_and_rivals() -> None:
    logits = _logits(3)
    rows = [
        _row(temperature=0.0, logprobs=0, logit_bias={42: 100.0}),
        _row(temperature=0.0),
        _row(temperature=0.5, top_k=1, logprobs=5),
    ]
    tokens, logprobs = _sampler().sample(Logits(logits), rows).to_host()
    expected = logits.log_softmax(dim=1)
    assert tokens[0] == 42
    assert logprobs[1] is None
    assert logprobs[0] is not None and logprobs[2] is not None
    assert logprobs[0].top == ()
    assert logprobs[0].logprob == pytest.approx(expected[0, 42].item(), abs=1e-6)
    assert logprobs[0].rank == 1 + int((expected[0] > expected[0, 42]).sum())
    assert logprobs[2].rank == 1
    assert [i for i, _ in logprobs[2].top] == expected[2].topk(5).indices.tolist()
    assert [p for _, p in logprobs[2].top] == pytest.approx(expected[2].topk(5).values.tolist())


def test_equally_likely_rivals_come_by_id_and_show_the_chosen_one() -> None:
    (logprob,) = prompt_logprobs(torch.zeros(1, _VOCAB), [250], 3).to_host()
    assert logprob.rank == 1
    assert 250 in [token_id for token_id, _ in logprob.top]
    assert [*logprob.top] == sorted(logprob.top, key=lambda pair: (-pair[1], pair[0]))


def test_more_rivals_than_tokens_gives_all_tokens() -> None:
    (logprob,) = prompt_logprobs(torch.zeros(1, _VOCAB), [0], _VOCAB + 9).to_host()
    assert len(logprob.top) == _VOCAB


def test_prompt_logprobs_equal_a_log_softmax_row_by_row() -> None:
    logits = _logits(150)
    targets = [(i * 7) % _VOCAB for i in range(150)]
    found = prompt_logprobs(logits, targets, 1).to_host()
    expected = logits.log_softmax(dim=1)
    assert [p.token_id for p in found] == targets
    assert [p.logprob for p in found] == pytest.approx(
        expected[range(150), targets].tolist(), abs=1e-6
    )
    assert [p.top[0][0] for p in found] == logits.argmax(dim=1).tolist()
    assert prompt_logprobs(logits[:0], [], 5).to_host() == []
