"""Steps that fail and rows that go bad: only those requests end, and the engine goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from polypath.runtime.engine import Engine
from polypath.runtime.errors import ContextLengthError, RequestError
from polypath.runtime.forward_batch import ForwardBatch
from polypath.runtime.graphs.mechanism import ReplayError
from polypath.runtime.logits import Logits
from polypath.runtime.planning.hardware import load_hardware
from polypath.runtime.planning.rules import native_variant
from polypath.runtime.request import FinishReason, SamplingParams
from polypath.runtime.runners.graph import GraphRunner
from polypath.tests.driving import build_engine, collect, finish, request, run, run_alone

needs_native = pytest.mark.skipif(
    native_variant(load_hardware("this")) is None, reason="no build of the kernels fits this CPU"
)


@pytest.fixture
def engine(random_llama: Path) -> Engine:
    """Fresh for every test, since these break it; eager, which calls the model at each step."""
    return build_engine(random_llama, pages=60, runner="eager")


def _break_forward(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, broken: Callable[[int], bool], message: str
) -> None:
    """Make the calls of the model fail whose number `broken` says yes to."""
    forward, calls = engine.model.forward, iter(range(1000))

    def failing(*args: object) -> torch.Tensor:
        if broken(next(calls)):
            raise RuntimeError(message)
        return forward(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.model, "forward", failing)


def test_a_step_that_fails_once_is_tried_again_and_counted(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = run(engine, [request("a", [5, 6, 7], max_tokens=5)])
    _break_forward(engine, monkeypatch, lambda call: call == 2, "once")
    assert run(engine, [request("a", [5, 6, 7], max_tokens=5)]) == expected
    reasons = {reason for _, _, reason in engine.counters.steps}
    assert "retry_after_failure" in reasons
    assert "once" in caplog.text


@needs_native
def test_a_graph_that_fails_is_tried_again_eagerly(
    random_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(random_llama, pages=60)
    expected = run(engine, [request("a", [5, 6, 7], max_tokens=5, ignore_eos=True)])
    replay, calls = GraphRunner.run, iter(range(1000))

    def failing(self: GraphRunner, batch: ForwardBatch) -> Logits:
        if next(calls) == 1:
            raise ReplayError("planted")
        return replay(self, batch)

    monkeypatch.setattr(GraphRunner, "run", failing)
    assert run(engine, [request("a", [5, 6, 7], max_tokens=5, ignore_eos=True)]) == expected
    assert engine.counters.steps["decode", "eager", "retry_after_failure"] == 1


@pytest.mark.parametrize("message", ["out of memory\nat line 7", ""])
def test_a_step_that_fails_twice_ends_its_requests_only(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    logging.disable(logging.CRITICAL)
    requests = [request(f"r{i}", [5 + i] * 20, max_tokens=8, ignore_eos=True) for i in range(3)]
    expected = run_alone(engine, requests)
    with monkeypatch.context() as patch:
        _break_forward(engine, patch, lambda call: call in (2, 3), message)
        engine.submit(requests[0])
        answers = {}
        for _ in range(3):
            collect(answers, engine.step())
    logging.disable(logging.NOTSET)
    for each in requests[1:]:
        engine.submit(each)
    finish(engine, answers)
    assert answers["r0"].finish_reason is FinishReason.ERROR
    assert answers["r0"].error is not None
    assert "line 7" not in answers["r0"].error
    assert {k: answers[k].token_ids for k in ("r1", "r2")} == {
        k: expected[k].token_ids for k in ("r1", "r2")
    }
    assert engine.stats()["step_failures_total"] == 1


def test_sampling_that_fails_ends_the_requests_of_its_step_and_not_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: object) -> None:
        raise RuntimeError("no memory for the sampler")

    with monkeypatch.context() as patch:
        patch.setattr(engine._sampler, "sample", failing)
        answer = run(engine, [request("a", [5, 6], max_tokens=4)])["a"]
    assert answer.finish_reason is FinishReason.ERROR
    assert len(run(engine, [request("b", [5, 6], max_tokens=4)])["b"].token_ids) == 4


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.9, "seed": 4}])
def test_a_row_that_is_not_finite_ends_its_own_request_only(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    poison: float,
    sampling: dict[str, Any],
) -> None:
    requests = [
        request(f"r{i}", [5 + i] * 3, max_tokens=6, ignore_eos=True, **sampling) for i in range(4)
    ]
    expected = run(engine, requests)
    forward = engine.model.forward

    def poisoned(batch: ForwardBatch, *args: object) -> Logits:
        logits = forward(batch, *args).values  # type: ignore[arg-type]
        if batch.num_rows == 4 and batch.kv_lens[0] == 6:
            logits[1, 7] = poison
        return Logits(logits)

    monkeypatch.setattr(engine.model, "forward", poisoned)
    found = run(engine, requests)
    assert found["r1"].finish_reason is FinishReason.ERROR
    for name in ("r0", "r2", "r3"):
        assert found[name].token_ids == expected[name].token_ids


def test_a_request_that_forbids_every_token_ends_with_that_sentence(engine: Engine) -> None:
    forbidding = request("a", [5], min_tokens=2, stop_token_ids=tuple(range(260)))
    found = run(engine, [forbidding, request("b", [5], max_tokens=2)])
    assert found["a"].finish_reason is FinishReason.ERROR
    assert "forbid every token" in (found["a"].error or "")
    assert len(found["b"].token_ids) == 2


@pytest.mark.parametrize(
    "sampling",
    [{"min_tokens": 2, "stop_token_ids": tuple(range(260))}, {"logit_bias": {5: 1e300}}],
)
def test_a_request_that_forbids_every_token_leaves_the_prefix_cache_alone(
    engine: Engine, sampling: dict[str, Any]
) -> None:
    shared = [5] * 40
    run(engine, [request("a", shared, max_tokens=2)])
    assert run(engine, [request("b", shared, **sampling)])["b"].finish_reason is FinishReason.ERROR
    assert run(engine, [request("c", shared, max_tokens=2)])["c"].cached_tokens == 32


def test_logits_that_are_not_finite_empty_the_prefix_cache(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = [5] * 40
    run(engine, [request("a", shared, max_tokens=2)])
    forward = engine.model.forward

    def broken(*args: Any) -> Logits:
        return Logits(forward(*args).values.fill_(torch.nan))

    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "forward", broken)
        answer = run(engine, [request("b", shared, max_tokens=2)])["b"]
    assert "not finite" in (answer.error or "")
    assert run(engine, [request("c", shared, max_tokens=2)])["c"].cached_tokens == 0


@pytest.mark.parametrize("num_outputs", [13, 500])
def test_a_resumed_request_longer_than_the_context_is_refused(
    random_llama: Path, num_outputs: int
) -> None:
    engine = build_engine(random_llama, pages=12, page_size=4, max_model_len=48)
    resumed = request("a", [5] * 36, output_ids=[6] * num_outputs, max_tokens=1000)
    with pytest.raises(ContextLengthError, match=f"{36 + num_outputs} tokens.*48"):
        engine.submit(resumed)
    assert not engine.has_work()


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("logprobs", -1),
        ("prompt_logprobs", -1),
        ("logit_bias", {5: float("nan")}),
        ("logit_bias", {5: float("inf")}),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("max_tokens", -1),
    ],
)
def test_params_out_of_range_are_refused_by_name(param: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{param: value})  # type: ignore[arg-type]
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("top_k", 1.5),
        ("top_k", None),
        ("seed", 0.5),
        ("seed", "7"),
        ("choice", 1.0),
        ("max_tokens", 3.0),
        ("max_tokens", True),
        ("min_tokens", 0.5),
        ("logprobs", 2.0),
        ("logprobs", True),
        ("prompt_logprobs", "1"),
        ("stop_token_ids", (2.5,)),
        ("stop_token_ids", "ab"),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {5: None}),
        ("temperature", "hot"),
        ("top_p", None),
        ("frequency_penalty", [1.0]),
    ],
)
def test_params_of_a_wrong_type_are_refused_by_name(param: str, value: object) -> None:
    with pytest.raises(RequestError, match=param) as caught:
        SamplingParams(**{param: value})  # type: ignore[arg-type]
    assert caught.value.param == param


@pytest.mark.parametrize(
    "sampling",
    [
        {"logprobs": 10**9},
        {"prompt_logprobs": 10**9},
        {"top_k": 10**30, "temperature": 1.0},
        {"seed": 10**40, "choice": 10**20, "temperature": 1.0},
        {"seed": -(10**40), "temperature": 1.0},
        {"stop_token_ids": (-1, 10**30), "min_tokens": 1},
        {"temperature": 1e-300},
        {"temperature": 1.0, "top_p": 1e-300},
        {"repetition_penalty": 1e-30},
        {"logit_bias": {5: -1e300, 6: 3.0}},
        {"max_tokens": 10**30},
    ],
)
def test_extremes_that_are_allowed_neither_fail_nor_touch_a_neighbour(
    engine: Engine, sampling: dict[str, Any]
) -> None:
    neighbour = request("b", [5, 6], max_tokens=3, ignore_eos=True)
    expected = run(engine, [neighbour])["b"].token_ids
    extreme: dict[str, Any] = {"max_tokens": 3, **sampling}
    found = run(engine, [request("a", [7, 8, 9], **extreme), neighbour])
    assert found["b"].token_ids == expected
    assert found["a"].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
