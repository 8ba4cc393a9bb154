"""Case 03: log-probabilities of a prompt equal transformers', with cache, chunks and neighbours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from polypath.runtime.request import FinishReason, Request, TokenLogprob
from polypath.tests import tiny_models
from polypath.tests.driving import Answer, build_yardstick, prompts, request, run
from polypath.tests.parity.reference import load_reference, reference_logits

TOLERANCE = 1e-3
CONTEXT = 4096
LENGTHS = (1, 2, 20, 300, 3000)

Scored = dict[int, tuple[list[int], torch.Tensor]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with room for a long prompt."""
    path = tmp_path_factory.mktemp("random")
    tiny_models.random(path, config={"max_position_embeddings": CONTEXT})
    return path


@pytest.fixture(scope="module")
def scored(folder: Path) -> Scored:
    """Prompts by length, and transformers' log-probabilities [T, V] of them."""
    model = load_reference(folder)
    generator = torch.Generator().manual_seed(0)
    found: Scored = {}
    for length in LENGTHS:
        ids = torch.randint(4, 260, (length,), generator=generator).tolist()
        found[length] = ids, reference_logits(model, ids).log_softmax(dim=-1)
    return found


def _request(name: str, ids: list[int], k: int, max_tokens: int = 0) -> Request:
    return request(name, ids, prompt_logprobs=k, max_tokens=max_tokens, ignore_eos=True)


def _check(answer: Answer, ids: list[int], expected: torch.Tensor, k: int) -> None:
    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.prompt_logprobs is not None
    first, *rest = answer.prompt_logprobs
    assert first is None
    assert len(rest) == len(ids) - 1
    for position, found in enumerate(rest):
        assert found is not None
        _check_one(found, ids[position + 1], expected[position], k)


def _check_one(found: TokenLogprob, token_id: int, expected_V: torch.Tensor, k: int) -> None:
    assert found.token_id == token_id
    assert abs(found.logprob - expected_V[token_id]) < TOLERANCE
    assert len(found.top) == k
    best = expected_V.topk(k).values.tolist()
    assert [p for _, p in found.top] == pytest.approx(best, abs=TOLERANCE)
    assert all(abs(expected_V[i] - p) < TOLERANCE for i, p in found.top)
    above = int((expected_V > expected_V[token_id] + TOLERANCE).sum())
    not_below = int((expected_V > expected_V[token_id] - TOLERANCE).sum())
    assert above < found.rank <= not_below


@pytest.mark.parametrize("k", [0, 1, 5])
@pytest.mark.parametrize("length", LENGTHS)
def test_scores_equal_transformers_the_first_and_the_second_time(
    folder: Path, scored: Scored, length: int, k: int
) -> None:
    engine = build_yardstick(folder, pages=300)
    ids, expected = scored[length]
    first = run(engine, [_request("a", ids, k)])["a"]
    second = run(engine, [_request("a", ids, k)])["a"]
    _check(first, ids, expected, k)
    assert first.token_ids == []
    assert second.prompt_logprobs == first.prompt_logprobs


@pytest.mark.parametrize("budget", [7, 16, 64])
def test_scores_equal_transformers_when_the_prefill_is_cut(
    folder: Path, scored: Scored, budget: int
) -> None:
    engine = build_yardstick(folder, pages=300, max_num_batched_tokens=budget, max_num_seqs=4)
    ids, expected = scored[300]
    _check(run(engine, [_request("a", ids, 1)])["a"], ids, expected, 1)


def test_scores_equal_transformers_beside_others_that_share_the_prompt(
    folder: Path, scored: Scored
) -> None:
    engine = build_yardstick(folder, pages=300, max_num_batched_tokens=100)
    ids, expected = scored[300]
    run(engine, [request("before", ids, max_tokens=3)])  # the prefix cache knows the prompt
    others = [request(f"o{i}", p, max_tokens=30) for i, p in enumerate(prompts(4))]
    found = run(engine, [*others[:2], _request("a", ids, 5), *others[2:]])
    _check(found["a"], ids, expected, 5)


def test_scores_come_with_the_first_token_when_tokens_are_wanted(
    folder: Path, scored: Scored
) -> None:
    engine = build_yardstick(folder, pages=300, max_num_batched_tokens=64)
    ids, expected = scored[300]
    answer = run(engine, [_request("a", ids, 1, max_tokens=4)])["a"]
    _check(answer, ids, expected, 1)
    assert len(answer.token_ids) == 4


def test_scores_survive_a_preemption(folder: Path, scored: Scored) -> None:
    engine = build_yardstick(
        folder,
        pages=136,
        page_size=4,
        max_model_len=400,
        max_num_batched_tokens=16,
        max_num_seqs=4,
    )
    ids, expected = scored[300]
    early = [
        request(f"o{i}", [5 + i] * 100, max_tokens=160, ignore_eos=True, priority=-1)
        for i in range(2)
    ]
    found = run(engine, [*early, _request("a", ids, 1, max_tokens=2)])
    assert engine.stats()["preemptions_total"]
    _check(found["a"], ids, expected, 1)


def test_nothing_to_score_and_nothing_to_say_just_ends(folder: Path) -> None:
    engine = build_yardstick(folder, pages=300)
    answer = run(engine, [request("a", [5, 6, 7], max_tokens=0)])["a"]
    assert (answer.token_ids, answer.prompt_logprobs) == ([], None)
    assert answer.finish_reason is FinishReason.LENGTH
