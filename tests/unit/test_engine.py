"""The engine on tiny models: batching, chunking, caching, preempting, resuming change nothing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from polypath.runtime.engine import Engine
from polypath.runtime.errors import ContextLengthError, QueueFullError, RequestError
from polypath.runtime.request import FinishReason, Request, RequestOutput
from polypath.tests import tiny_models
from polypath.tests.driving import (
    Answer,
    assert_empty,
    assert_same_greedy,
    build_engine,
    collect,
    finish,
    prompts,
    request,
    run,
    run_alone,
)

CONTEXT = 512  # positions of the tiny models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama."""
    path = tmp_path_factory.mktemp("random")
    tiny_models.random(path)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    """Room for everything; no prefix cache, so that tests do not feed each other."""
    return build_engine(folder, pages=400, prefix_cache=False)


def _greedy(count: int, **sampling: Any) -> list[Request]:
    return [
        request(f"greedy-{i}", ids, max_tokens=20, logprobs=2, **sampling)
        for i, ids in enumerate(prompts(count))
    ]


def _seeded(count: int) -> list[Request]:
    return [
        request(f"seeded-{i}", ids, max_tokens=20, temperature=1.0, top_p=0.9, seed=i)
        for i, ids in enumerate(prompts(count, seed=1))
    ]


def _compare(ours: dict[str, Answer], reference: dict[str, Answer]) -> None:
    """Drawn ids equal; greedy ones equal up to a near-tie."""
    assert ours.keys() == reference.keys()
    for name, answer in reference.items():
        if name.startswith("greedy"):
            assert_same_greedy(ours[name].token_ids, answer)
        else:
            assert ours[name].token_ids == answer.token_ids
        assert ours[name].finish_reason == answer.finish_reason


# Batching, chunking, caching


def test_32_requests_together_say_what_each_says_alone(engine: Engine) -> None:
    requests = _greedy(16) + _seeded(16)
    together = run(engine, requests)
    _compare(together, run_alone(engine, requests))
    assert len(together) == 32


def test_32_requests_run_in_one_batch(engine: Engine) -> None:
    for each in _greedy(32, ignore_eos=True):
        engine.submit(each)
    most = 0
    answers: dict[str, Answer] = {}
    while engine.has_work():
        collect(answers, engine.step())
        most = max(most, engine.stats()["running"])  # type: ignore[call-overload]
    assert most == 32


@pytest.mark.parametrize("budget", [7, 16, 64])
def test_a_chunked_prefill_changes_nothing(folder: Path, engine: Engine, budget: int) -> None:
    chunked = build_engine(
        folder, pages=400, prefix_cache=False, max_num_batched_tokens=budget, max_num_seqs=5
    )
    requests = _greedy(8) + _seeded(8)
    _compare(run(chunked, requests), run_alone(engine, requests))


@pytest.mark.parametrize("page_size", [1, 4, 32, 128])
def test_the_page_size_changes_nothing(folder: Path, engine: Engine, page_size: int) -> None:
    other = build_engine(folder, pages=3200 // page_size, page_size=page_size, prefix_cache=False)
    requests = _greedy(8) + _seeded(8)
    _compare(run(other, requests), run_alone(engine, requests))


def test_a_cached_prefix_changes_nothing(folder: Path, engine: Engine) -> None:
    cached = build_engine(folder, pages=400)
    start = prompts(1, longest=2, seed=9)[0] * 50
    requests = [
        request(f"greedy-{i}", [*start, *ids], max_tokens=12, logprobs=2)
        for i, ids in enumerate(prompts(8))
    ]
    expected = run_alone(engine, requests)
    for _ in range(2):
        _compare(run(cached, requests), expected)
    again = run(cached, requests)
    assert all(answer.cached_tokens >= len(start) // 16 * 16 for answer in again.values())
    assert all(answer.cached_tokens == 0 for answer in expected.values())


def test_the_same_prompt_again_computes_only_its_last_page(folder: Path) -> None:
    engine = build_engine(folder, pages=40)
    ids = prompts(1, longest=40, seed=3)[0][:1] * 48
    first = run(engine, [request("a", ids, max_tokens=3)])["a"]
    second = run(engine, [request("b", ids, max_tokens=3)])["b"]
    assert (first.cached_tokens, second.cached_tokens) == (0, 32)
    assert first.token_ids == second.token_ids


# Preemption and resuming


def test_preemption_changes_nothing(folder: Path, engine: Engine) -> None:
    tiny = build_engine(folder, pages=12, max_model_len=96, prefix_cache=False)
    requests = _greedy(10) + _seeded(10)
    found = run(tiny, requests)
    assert tiny.stats()["preemptions_total"]
    _compare(found, run_alone(engine, requests))


def test_preemption_with_a_prefix_cache_changes_nothing(folder: Path, engine: Engine) -> None:
    tiny = build_engine(folder, pages=12, max_model_len=96)
    requests = _greedy(10) + _seeded(10)
    found = run(tiny, requests)
    assert tiny.stats()["preemptions_total"]
    _compare(found, run_alone(engine, requests))


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


# Ends


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


# Case 17: at the context limit


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
    requests = _greedy(4)
    expected = run_alone(engine, requests)
    long = request("long", [5 + i % 200 for i in range(CONTEXT - 1)])
    found = run(engine, [*requests[:2], long, *requests[2:]])
    assert len(found.pop("long").token_ids) == 1
    _compare(found, expected)


# Case 16: penalties of neighbours


def _neighbours() -> dict[str, Request]:
    ids = prompts(5, longest=50, seed=6)
    return {
        "A": request("A", ids[0], max_tokens=12),
        "B": request("B", ids[1] * 3, max_tokens=12, repetition_penalty=2.0),
        "C": request("C", ids[2][:1], max_tokens=12, frequency_penalty=2.0),
        "D": request("D", ids[3], max_tokens=12, presence_penalty=-2.0),
        "E": request("E", ids[4], max_tokens=12, temperature=1.0, seed=3, top_k=5),
    }


def test_penalties_stay_with_their_request_in_all_24_orders(engine: Engine) -> None:
    everyone = _neighbours()
    expected = {k: a.token_ids for k, a in run_alone(engine, everyone.values()).items()}
    for order in permutations("ABCD"):
        found = run(engine, [everyone[name] for name in order])
        assert {k: a.token_ids for k, a in found.items()} == {k: expected[k] for k in order}


def test_penalties_stay_with_their_request_while_others_join_and_leave(engine: Engine) -> None:
    everyone = _neighbours()
    expected = {k: a.token_ids for k, a in run_alone(engine, everyone.values()).items()}
    answers: dict[str, Answer] = {}
    for name in "EDCBA":
        engine.submit(everyone[name])
        for _ in range(4):
            collect(answers, engine.step())
    finish(engine, answers)
    assert {k: a.token_ids for k, a in answers.items()} == expected


def test_presence_does_not_count_the_prompt(engine: Engine) -> None:
    ids = [77] * 200
    plain = run(engine, [request("a", ids, max_tokens=1)])["a"]
    punished = run(engine, [request("a", ids, max_tokens=1, presence_penalty=2.0)])["a"]
    assert punished.token_ids == plain.token_ids


# Case 18: cancelling


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


def test_cancelling_a_waiting_request(folder: Path) -> None:
    engine = build_engine(folder, pages=40, max_num_seqs=1)
    engine.submit(request("first", [5, 6, 7], max_tokens=30, ignore_eos=True))
    engine.submit(request("waits", [5, 6, 7]))
    answers = _until(engine, bool)
    engine.cancel("waits")
    _assert_gone(engine, "waits", answers)
    finish(engine, answers)
    assert len(answers["first"].token_ids) == 30


def test_cancelling_in_the_middle_of_a_chunked_prefill(folder: Path) -> None:
    engine = build_engine(folder, pages=40, max_num_batched_tokens=16, max_num_seqs=4)
    engine.submit(request("a", [5] * 200))
    answers: dict[str, Answer] = {}
    for _ in range(3):
        collect(answers, engine.step())
    assert "a" not in answers
    engine.cancel("a")
    _assert_gone(engine, "a", answers)
    assert_empty(engine)


def test_cancelling_a_decoding_request_leaves_the_others_alone(engine: Engine) -> None:
    requests = _greedy(4, ignore_eos=True)
    expected = run_alone(engine, requests)
    for each in requests:
        engine.submit(each)
    answers = _until(engine, lambda outputs: len(outputs) == 4)
    engine.cancel("greedy-2")
    _assert_gone(engine, "greedy-2", answers)
    finish(engine, answers)
    del answers["greedy-2"], expected["greedy-2"]
    _compare(answers, expected)


def test_cancelling_a_preempted_request(folder: Path) -> None:
    engine = build_engine(folder, pages=7, max_model_len=96, prefix_cache=False)
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


def test_a_cancelled_prompt_gives_its_shared_pages_back(folder: Path) -> None:
    engine = build_engine(folder, pages=40)
    ids = [5 + i for i in range(100)]
    run(engine, [request("before", ids, max_tokens=2)])
    engine.submit(request("a", ids, max_tokens=40, ignore_eos=True))
    answers = _until(engine, bool)
    engine.cancel("a")
    finish(engine, answers)
    assert run(engine, [request("after", ids, max_tokens=2)])["after"].cached_tokens == 96


# Refusals


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


def test_a_full_queue_says_so_and_when_to_come_back(folder: Path) -> None:
    engine = build_engine(folder, pages=40, max_num_seqs=1, max_waiting=2)
    for i in range(3):
        engine.submit(request(f"r{i}", [5], max_tokens=2))
    with pytest.raises(QueueFullError) as caught:
        engine.submit(request("r3", [5], max_tokens=2))
    assert caught.value.retry_after_s > 0
    assert len(finish(engine)) == 3
