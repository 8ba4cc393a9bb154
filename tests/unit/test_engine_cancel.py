"""Case 18: cancelling in each state frees everything and touches nobody else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from polypath.runtime.engine import Engine
from polypath.runtime.request import FinishReason, RequestOutput
from polypath.tests.driving import (
    Answer,
    assert_empty,
    assert_same_answers,
    build_engine,
    collect,
    finish,
    greedy,
    request,
    run,
    run_alone,
)


@pytest.fixture(scope="module")
def engine(random_llama: Path) -> Engine:
    """Room for everything; no prefix cache, so that tests do not feed each other."""
    return build_engine(random_llama, pages=400, prefix_cache=False)


def _until(engine: Engine, reached: Callable[[list[RequestOutput]], bool]) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    for _ in range(1000):
        outputs = engine.step()
        collect(answers, outputs)
        if reached(outputs):
            return answers
    raise AssertionError("the state was never reached")


def _assert_gone(engine: Engine, name: str, answers: dict[str, Answer]) -> None:
    """Within two steps the request has ended as cancelled, and nothing is left."""
    for _ in range(2):
        collect(answers, engine.step())
    assert answers[name].finish_reason is FinishReason.CANCELLED
    assert not engine.knows(name)


def test_cancelling_before_the_first_step(engine: Engine) -> None:
    engine.submit(request("a", [5, 6, 7]))
    engine.cancel("a")
    answers: dict[str, Answer] = {}
    _assert_gone(engine, "a", answers)
    assert answers["a"].token_ids == []
    assert_empty(engine)


def test_cancelling_a_waiting_request(random_llama: Path) -> None:
    engine = build_engine(random_llama, pages=40, max_num_seqs=1)
    engine.submit(request("first", [5, 6, 7], max_tokens=30, ignore_eos=True))
    engine.submit(request("waits", [5, 6, 7]))
    answers = _until(engine, bool)
    engine.cancel("waits")
    _assert_gone(engine, "waits", answers)
    finish(engine, answers)
    assert len(answers["first"].token_ids) == 30


def test_cancelling_in_the_middle_of_a_chunked_prefill(random_llama: Path) -> None:
    engine = build_engine(random_llama, pages=40, max_num_batched_tokens=16, max_num_seqs=4)
    engine.submit(request("a", [5] * 200))
    answers: dict[str, Answer] = {}
    for _ in range(3):
        collect(answers, engine.step())
    assert "a" not in answers
    engine.cancel("a")
    _assert_gone(engine, "a", answers)
    assert_empty(engine)


def test_cancelling_a_decoding_request_leaves_the_others_alone(engine: Engine) -> None:
    requests = greedy(4, ignore_eos=True)
    expected = run_alone(engine, requests)
    for each in requests:
        engine.submit(each)
    answers = _until(engine, lambda outputs: len(outputs) == 4)
    engine.cancel("greedy-2")
    _assert_gone(engine, "greedy-2", answers)
    finish(engine, answers)
    del answers["greedy-2"], expected["greedy-2"]
    assert_same_answers(answers, expected)


def test_cancelling_a_preempted_request(random_llama: Path) -> None:
    engine = build_engine(random_llama, pages=7, max_model_len=96, prefix_cache=False)
    for i in range(2):
        engine.submit(request(f"r{i}", [5] * 40, max_tokens=40, ignore_eos=True))
    answers = _until(engine, lambda _: bool(engine.stats()["preemptions_total"]))
    assert engine.stats()["waiting"] == 1
    engine.cancel("r1")
    _assert_gone(engine, "r1", answers)
    finish(engine, answers)
    assert len(answers["r0"].token_ids) == 40


def test_cancelling_one_of_several_answers_to_a_prompt(engine: Engine) -> None:
    choices = [
        request(f"c{i}", [5] * 40, max_tokens=10, ignore_eos=True, temperature=1.0, choice=i)
        for i in range(3)
    ]
    for each in choices:
        engine.submit(each)
    answers = _until(engine, bool)
    engine.cancel("c1")
    finish(engine, answers)
    assert [answers[f"c{i}"].finish_reason for i in range(3)] == [
        FinishReason.LENGTH,
        FinishReason.CANCELLED,
        FinishReason.LENGTH,
    ]


def test_cancelling_twice_after_the_end_or_an_unknown_id_is_nothing(engine: Engine) -> None:
    engine.cancel("nobody")
    engine.submit(request("a", [5, 6, 7], max_tokens=30, ignore_eos=True))
    answers = _until(engine, bool)
    engine.cancel("a")
    engine.cancel("a")
    _assert_gone(engine, "a", answers)
    engine.cancel("a")
    assert not engine.has_work()
    assert engine.step() == []


def test_a_cancelled_prompt_gives_its_shared_pages_back(random_llama: Path) -> None:
    engine = build_engine(random_llama, pages=40)
    ids = [5 + i for i in range(100)]
    run(engine, [request("before", ids, max_tokens=2)])
    engine.submit(request("a", ids, max_tokens=40, ignore_eos=True))
    answers = _until(engine, bool)
    engine.cancel("a")
    finish(engine, answers)
    assert run(engine, [request("after", ids, max_tokens=2)])["after"].cached_tokens == 96
