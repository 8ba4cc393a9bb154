"""Where an answer ends, and what the engine refuses (case 17: at the context limit)."""

from __future__ import annotations

from pathlib import Path

import pytest

from polypath.runtime.engine import Engine
from polypath.runtime.errors import ContextLengthError, QueueFullError, RequestError
from polypath.runtime.request import FinishReason
from polypath.tests import tiny_models
from polypath.tests.driving import (
    assert_empty,
    assert_same_answers,
    build_engine,
    finish,
    greedy,
    request,
    run,
    run_alone,
)

CONTEXT = 512  # positions of the tiny models


@pytest.fixture(scope="module")
def engine(random_llama: Path) -> Engine:
    """Room for everything; no prefix cache, so that tests do not feed each other."""
    return build_engine(random_llama, pages=400, prefix_cache=False)


def test_ends_at_an_end_token_and_says_it(tmp_path: Path) -> None:
    said, _ = tiny_models.script(tmp_path, ["helo", "</s>"])
    engine = build_engine(tmp_path)
    prompt = [4 + ord(":")]
    stopped = run(engine, [request("a", prompt)])["a"]
    assert (stopped.token_ids, stopped.finish_reason) == (said, FinishReason.STOP)
    going_on = run(engine, [request("a", prompt, ignore_eos=True, max_tokens=8)])["a"]
    assert going_on.token_ids == (said * 2)[:8]
    assert going_on.finish_reason is FinishReason.LENGTH


def test_ends_at_stop_token_ids_also_with_ignore_eos(tmp_path: Path) -> None:
    said, _ = tiny_models.script(tmp_path, ["helo", "</s>"])
    engine = build_engine(tmp_path)
    prompt, stops = [4 + ord(":")], (said[2],)
    answer = run(engine, [request("a", prompt, stop_token_ids=stops, ignore_eos=True)])["a"]
    assert (answer.token_ids, answer.finish_reason) == (said[:3], FinishReason.STOP)


def test_min_tokens_holds_ends_back(tmp_path: Path) -> None:
    said, _ = tiny_models.script(tmp_path, ["hi", "</s>"])
    engine = build_engine(tmp_path)
    answer = run(engine, [request("a", [4 + ord(":")], min_tokens=5, max_tokens=9)])["a"]
    assert len(answer.token_ids) >= 5
    assert said[-1] not in answer.token_ids[:5]


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_ends_at_max_tokens(engine: Engine, max_tokens: int) -> None:
    answer = run(engine, [request("a", [5, 6, 7], max_tokens=max_tokens, ignore_eos=True)])["a"]
    assert len(answer.token_ids) == max_tokens
    assert answer.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("max_tokens", [None, 1, 2, 100])
@pytest.mark.parametrize("missing", [2, 1])
def test_just_below_the_context_gives_what_fits(
    engine: Engine, missing: int, max_tokens: int | None
) -> None:
    ids = [5 + i % 200 for i in range(CONTEXT - missing)]
    answer = run(engine, [request("a", ids, max_tokens=max_tokens, ignore_eos=True)])["a"]
    assert len(answer.token_ids) == min(missing, max_tokens or missing)
    assert answer.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 5 * CONTEXT])
@pytest.mark.parametrize("max_tokens", [None, 1, 100])
def test_at_the_context_and_above_is_refused_with_both_numbers(
    engine: Engine, length: int, max_tokens: int | None
) -> None:
    with pytest.raises(ContextLengthError) as caught:
        engine.submit(request("a", [5] * length, max_tokens=max_tokens))
    assert str(length) in caught.value.message
    assert str(CONTEXT) in caught.value.message
    assert caught.value.param == "prompt"
    assert_empty(engine)


def test_a_prompt_that_fills_the_context_can_still_be_scored(engine: Engine) -> None:
    ids = [5 + i % 200 for i in range(CONTEXT)]
    answer = run(engine, [request("a", ids, max_tokens=0, prompt_logprobs=1)])["a"]
    assert answer.token_ids == []
    assert answer.prompt_logprobs is not None
    assert len(answer.prompt_logprobs) == CONTEXT


def test_a_neighbour_at_the_limit_changes_nothing(engine: Engine) -> None:
    requests = greedy(4)
    expected = run_alone(engine, requests)
    long = request("long", [5 + i % 200 for i in range(CONTEXT - 1)])
    found = run(engine, [*requests[:2], long, *requests[2:]])
    assert len(found.pop("long").token_ids) == 1
    assert_same_answers(found, expected)


def test_refuses_what_can_never_run_and_queues_nothing(engine: Engine) -> None:
    for wrong, param in (
        (request("a", []), "prompt"),
        (request("a", [260]), "prompt"),
        (request("a", [-1]), "prompt"),
        (request("a", [5], output_ids=[400]), "output_ids"),
        (request("a", [5], logit_bias={260: 1.0}), "logit_bias"),
        (request("a", [5], logit_bias={-1: 1.0}), "logit_bias"),
    ):
        with pytest.raises(RequestError) as caught:
            engine.submit(wrong)
        assert caught.value.param == param
    assert_empty(engine)
    assert not engine.has_work()


def test_refuses_an_id_that_is_in_use(engine: Engine) -> None:
    engine.submit(request("a", [5], max_tokens=2))
    with pytest.raises(RequestError):
        engine.submit(request("a", [6], max_tokens=2))
    finish(engine)


def test_a_full_queue_says_so_and_when_to_come_back(random_llama: Path) -> None:
    engine = build_engine(random_llama, pages=40, max_num_seqs=1, max_waiting=2)
    for i in range(3):
        engine.submit(request(f"r{i}", [5], max_tokens=2))
    with pytest.raises(QueueFullError) as caught:
        engine.submit(request("r3", [5], max_tokens=2))
    assert caught.value.retry_after_s > 0
    assert len(finish(engine)) == 3
