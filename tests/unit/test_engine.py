"""The engine on tiny models: batching, chunking, caching, preempting, resuming change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polypath.kernels.philox import uniform
from polypath.runtime.engine import Engine
from polypath.runtime.request import FinishReason, Request
from polypath.tests.driving import (
    Answer,
    assert_same_answers,
    build_engine,
    collect,
    greedy,
    prompts,
    request,
    run,
    run_alone,
)


@pytest.fixture(scope="module")
def engine(random_llama: Path) -> Engine:
    """Room for everything; no prefix cache, so that tests do not feed each other."""
    return build_engine(random_llama, pages=400, prefix_cache=False)


def _seeded(count: int) -> list[Request]:
    return [
        request(f"seeded-{i}", ids, max_tokens=20, temperature=1.0, top_p=0.9, seed=i)
        for i, ids in enumerate(prompts(count, seed=1))
    ]


def test_32_requests_together_say_what_each_says_alone(engine: Engine) -> None:
    requests = greedy(16) + _seeded(16)
    together = run(engine, requests)
    assert_same_answers(together, run_alone(engine, requests))
    assert len(together) == 32


def test_every_position_has_noise_of_its_own(engine: Engine) -> None:
    """At temperature 100 all tokens are about equally likely, so the noise alone chooses."""
    even = request("a", [5], temperature=100.0, max_tokens=40, ignore_eos=True, seed=1)
    said = run(engine, [even])["a"].token_ids
    expected = [int(uniform(1, 0, position) * 260) for position in range(40)]
    assert max(abs(a - b) for a, b in zip(said, expected, strict=True)) < 20


def test_32_requests_run_in_one_batch(engine: Engine) -> None:
    for each in greedy(32, ignore_eos=True):
        engine.submit(each)
    most = 0
    answers: dict[str, Answer] = {}
    while engine.has_work():
        collect(answers, engine.step())
        most = max(most, engine.stats()["running"])  # type: ignore[call-overload]
    assert most == 32


@pytest.mark.parametrize("budget", [7, 16, 64])
def test_a_chunked_prefill_changes_nothing(random_llama: Path, engine: Engine, budget: int) -> None:
    chunked = build_engine(
        random_llama, pages=400, prefix_cache=False, max_num_batched_tokens=budget, max_num_seqs=5
    )
    requests = greedy(8) + _seeded(8)
    assert_same_answers(run(chunked, requests), run_alone(engine, requests))


@pytest.mark.parametrize("page_size", [1, 4, 32, 128])
def test_the_page_size_changes_nothing(random_llama: Path, engine: Engine, page_size: int) -> None:
    other = build_engine(
        random_llama, pages=3200 // page_size, page_size=page_size, prefix_cache=False
    )
    requests = greedy(8) + _seeded(8)
    assert_same_answers(run(other, requests), run_alone(engine, requests))


def test_a_cached_prefix_changes_nothing(random_llama: Path, engine: Engine) -> None:
    cached = build_engine(random_llama, pages=400)
    start = prompts(1, longest=2, seed=9)[0] * 50
    requests = [
        request(f"greedy-{i}", [*start, *ids], max_tokens=12, logprobs=2)
        for i, ids in enumerate(prompts(8))
    ]
    expected = run_alone(engine, requests)
    for _ in range(2):
        assert_same_answers(run(cached, requests), expected)
    again = run(cached, requests)
    assert all(answer.cached_tokens >= len(start) // 16 * 16 for answer in again.values())
    assert all(answer.cached_tokens == 0 for answer in expected.values())


def test_the_same_prompt_again_computes_only_its_last_page(random_llama: Path) -> None:
    engine = build_engine(random_llama, pages=40)
    ids = prompts(1, longest=40, seed=3)[0][:1] * 48
    first = run(engine, [request("a", ids, max_tokens=3)])["a"]
    second = run(engine, [request("b", ids, max_tokens=3)])["b"]
    assert (first.cached_tokens, second.cached_tokens) == (0, 32)
    assert first.token_ids == second.token_ids


def test_preemption_changes_nothing(random_llama: Path, engine: Engine) -> None:
    tiny = build_engine(random_llama, pages=12, max_model_len=96, prefix_cache=False)
    requests = greedy(10) + _seeded(10)
    found = run(tiny, requests)
    assert tiny.stats()["preemptions_total"]
    assert_same_answers(found, run_alone(engine, requests))


def test_preemption_with_a_prefix_cache_changes_nothing(random_llama: Path, engine: Engine) -> None:
    tiny = build_engine(random_llama, pages=12, max_model_len=96)
    requests = greedy(10) + _seeded(10)
    found = run(tiny, requests)
    assert tiny.stats()["preemptions_total"]
    assert_same_answers(found, run_alone(engine, requests))


@pytest.mark.parametrize("done", [1, 7, 15, 19])
@pytest.mark.parametrize(
    "sampling",
    [
        {"logprobs": 2},
        {"temperature": 1.0, "seed": 5, "top_p": 0.9},
        {"temperature": 1.0, "seed": 5, "choice": 3, "frequency_penalty": 1.0},
        {"repetition_penalty": 1.5, "logprobs": 2},
        {"min_tokens": 18, "temperature": 1.5, "seed": 2},
    ],
    ids=["greedy", "seeded", "frequency", "repetition", "min_tokens"],
)
def test_resuming_goes_on_where_it_stopped(
    engine: Engine, done: int, sampling: dict[str, Any]
) -> None:
    ids = prompts(1, seed=4)[0]
    whole = run(engine, [request("a", ids, max_tokens=20, ignore_eos=True, **sampling)])["a"]
    resumed = run(
        engine,
        [
            request(
                "a",
                ids,
                output_ids=whole.token_ids[:done],
                max_tokens=20,
                ignore_eos=True,
                **sampling,
            )
        ],
    )["a"]
    assert resumed.first_position == done
    assert whole.token_ids[:done] + resumed.token_ids == whole.token_ids
    assert resumed.finish_reason is FinishReason.LENGTH


def test_a_request_resumed_at_its_limit_ends_at_once(engine: Engine) -> None:
    answer = run(engine, [request("a", [5, 6], output_ids=[7, 8, 9], max_tokens=3)])["a"]
    assert (answer.token_ids, answer.finish_reason) == ([], FinishReason.LENGTH)
