"""200 random requests with random arrivals, cancels, priorities and tiny page pools, for real."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polypath.runtime.engine import Engine
from polypath.runtime.request import FinishReason, Request
from polypath.tests.driving import (
    Answer,
    assert_empty,
    assert_same_greedy,
    build_engine,
    collect,
    request,
    run,
)

PAGE, CONTEXT = 4, 48
NUM_REQUESTS = 200


def _random_request(rng: Random, name: str) -> Request:
    prompt = [rng.choice((50, 60)) for _ in range(rng.randint(1, CONTEXT - 1))]
    sampling: dict[str, Any] = {
        "max_tokens": rng.choice((0, 1, 3, 8, 20)),
        "logprobs": rng.choice((None, 2)),
        "prompt_logprobs": rng.choice((None, None, 1)),
    }
    if rng.random() < 0.5:
        sampling |= {
            "temperature": 1.0,
            "seed": rng.randrange(2**32),
            "top_p": rng.choice((1.0, 0.8)),
            "frequency_penalty": rng.choice((0.0, 1.0)),
        }
    return request(name, prompt, priority=rng.choice((0, 0, 0, -1, 1)), **sampling)


def _live(engine: Engine, rng: Random) -> tuple[dict[str, Request], dict[str, Answer]]:
    requests: dict[str, Request] = {}
    answers: dict[str, Answer] = {}
    while len(requests) < NUM_REQUESTS or engine.has_work():
        if len(requests) < NUM_REQUESTS and (not engine.has_work() or rng.random() < 0.6):
            name = f"r{len(requests)}"
            requests[name] = _random_request(rng, name)
            engine.submit(requests[name])
            continue
        if rng.random() < 0.05:
            engine.cancel(rng.choice(list(requests)))
        collect(answers, engine.step())
    assert_empty(engine)
    return requests, answers


def _check(requests: dict[str, Request], answers: dict[str, Answer]) -> None:
    assert answers.keys() == requests.keys()
    for name, answer in answers.items():
        params = requests[name].sampling
        assert answer.finish_reason is not None, name
        assert answer.finish_reason is not FinishReason.ERROR, answer.error
        assert len(answer.token_ids) <= (params.max_tokens or 0)
        assert len(answer.logprobs) == (0 if params.logprobs is None else len(answer.token_ids))
        if answer.finish_reason is FinishReason.CANCELLED:
            continue
        if params.prompt_logprobs is not None:
            assert answer.prompt_logprobs is not None
            assert len(answer.prompt_logprobs) == len(requests[name].prompt_ids)


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    pages=st.integers(CONTEXT // PAGE, 30),
    seqs=st.integers(4, 8),
    budget=st.integers(8, 64),
    cache=st.booleans(),
)
def test_all_finish_or_were_cancelled_and_the_pool_ends_empty(
    random_llama: Path, seed: int, pages: int, seqs: int, budget: int, cache: bool
) -> None:
    engine = build_engine(
        random_llama,
        pages=pages,
        page_size=PAGE,
        max_model_len=CONTEXT,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        prefix_cache=cache,
    )
    _check(*_live(engine, Random(seed)))


def test_what_survives_preemptions_and_cancels_is_what_is_said_alone(random_llama: Path) -> None:
    tiny = build_engine(
        random_llama, pages=14, page_size=PAGE, max_model_len=CONTEXT, max_num_batched_tokens=24
    )
    requests, answers = _live(tiny, Random(5))
    _check(requests, answers)
    reasons = [answer.finish_reason for answer in answers.values()]
    assert tiny.stats()["preemptions_total"]
    assert tiny.stats()["prefix_cached_tokens_total"]
    assert reasons.count(FinishReason.CANCELLED) > 3
    alone = build_engine(
        random_llama, pages=30, page_size=16, max_model_len=CONTEXT, prefix_cache=False
    )
    for name, answer in answers.items():
        if answer.finish_reason is not FinishReason.CANCELLED:
            expected = run(alone, [requests[name]])[name]
            if answer.token_ids != expected.token_ids and expected.logprobs:
                assert_same_greedy(answer.token_ids, expected)
            else:
                assert answer.token_ids == expected.token_ids
            assert answer.finish_reason == expected.finish_reason
