"""Overlap depth 1, forced on a CPU: the next step is launched before the tokens of the one that
runs are known, and no answer changes for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from polypath.runtime.config import EngineConfig
from polypath.runtime.device_sampler import DeviceSampled, DeviceSampler
from polypath.runtime.engine import Engine
from polypath.runtime.errors import ConfigurationError
from polypath.runtime.forward_batch import ForwardBatch
from polypath.runtime.logits import Logits
from polypath.runtime.model_runner import ModelRunner
from polypath.runtime.overlap import Overlap
from polypath.runtime.request import FinishReason, Request
from polypath.runtime.scheduler import RequestState, ScheduledRow
from polypath.tests import tiny_models
from polypath.tests.driving import (
    Answer,
    assert_empty,
    build_engine,
    collect,
    finish,
    prompts,
    request,
    run,
)

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 3, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "first": {"temperature": 0.8, "seed": 3, "choice": 0},
    "second": {"temperature": 0.8, "seed": 3, "choice": 1},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 1},
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"temperature": 1.0, "seed": 9, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    "biased": {"logit_bias": {7: 2.0, 9: -100.0}},
    "patient": {"min_tokens": 6, "stop_token_ids": tuple(range(0, 260, 9))},
    "stopped": {"stop_token_ids": tuple(range(0, 260, 5))},
    "prompt only": {"max_tokens": 0, "prompt_logprobs": 0},
}


def requests() -> list[Request]:
    """Three of each kind, of different lengths."""
    found = []
    for i, ids in enumerate(prompts(3 * len(KINDS), longest=40)):
        kind = list(KINDS)[i % len(KINDS)]
        sampling = {"max_tokens": 4 + i % 9, "ignore_eos": i % 2 == 0} | KINDS[kind]
        found.append(request(f"{kind}-{i}", ids, **sampling))
    return found


def engine_of(folder: Path, depth: int, **options: Any) -> Engine:
    settings: dict[str, Any] = {"pages": 400, "page_size": 4, "max_model_len": 64}
    return build_engine(folder, overlap_depth=depth, **(settings | options))


@pytest.fixture(scope="module")
def engine(random_llama: Path) -> Engine:
    return engine_of(random_llama, 1, prefix_cache=False)


@pytest.fixture(scope="module")
def expected(random_llama: Path) -> dict[str, Answer]:
    """What depth 0 says, with room for everything."""
    return run(engine_of(random_llama, 0, prefix_cache=False), requests())


def assert_same(found: dict[str, Answer], expected: dict[str, Answer]) -> None:
    assert found.keys() == expected.keys()
    for name, answer in expected.items():
        ours = found[name]
        assert (ours.token_ids, ours.finish_reason) == (answer.token_ids, answer.finish_reason)
        assert [each.token_id for each in ours.logprobs] == answer.token_ids[: len(ours.logprobs)]
        assert len(ours.logprobs) == len(answer.logprobs)
        assert (ours.prompt_logprobs is None) == (answer.prompt_logprobs is None)
        for a, b in zip(ours.prompt_logprobs or (), answer.prompt_logprobs or (), strict=True):
            assert (a is None) == (b is None)
            assert a is None or b is None or abs(a.logprob - b.logprob) < 1e-4


@pytest.mark.parametrize(
    "options",
    [
        {"prefix_cache": False},
        {"pages": 24},  # preempts
        {"max_num_batched_tokens": 24, "max_num_seqs": 6},  # cuts prompts
        {"pages": 20, "max_num_batched_tokens": 16, "max_num_seqs": 4, "prefix_cache": False},
    ],
)
def test_every_kind_of_request_says_what_it_says_at_depth_0(
    random_llama: Path, expected: dict[str, Answer], options: dict[str, Any]
) -> None:
    engine = engine_of(random_llama, 1, **options)
    assert_same(run(engine, requests()), expected)
    assert engine.counters.overlap[Overlap.PENALTIES]
    if options.get("pages"):
        assert engine.stats()["preemptions_total"]


def test_requests_may_come_and_go_at_any_step(
    random_llama: Path, expected: dict[str, Answer]
) -> None:
    engine = engine_of(random_llama, 1, pages=26, max_num_batched_tokens=32)
    rng, answers = Random(1), {}
    waiting = requests()
    cancelled = {each.id for each in rng.sample(waiting, 6)}
    while waiting or engine.has_work():
        if waiting and rng.random() < 0.5:
            engine.submit(waiting.pop(0))
        for name in [name for name in cancelled if engine.knows(name) and rng.random() < 0.2]:
            engine.cancel(name)
        collect(answers, engine.step())
    assert_empty(engine)
    gone = {n for n, a in answers.items() if a.finish_reason is FinishReason.CANCELLED}
    assert gone and gone <= cancelled
    for name in gone:
        said = answers.pop(name).token_ids
        assert said == expected[name].token_ids[: len(said)]
    assert_same(answers, {name: a for name, a in expected.items() if name in answers})


def test_the_next_step_is_launched_before_the_tokens_of_the_last_are_read(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    forward, to_host = ModelRunner.forward, DeviceSampled.to_host

    def launch(self: ModelRunner, batch: ForwardBatch) -> Any:
        seen.append("launch")
        return forward(self, batch)

    def read(self: DeviceSampled) -> Any:
        seen.append("read")
        return to_host(self)

    monkeypatch.setattr(ModelRunner, "forward", launch)
    monkeypatch.setattr(DeviceSampled, "to_host", read)
    answer = run(engine, [request("a", [5, 6, 7], max_tokens=4, ignore_eos=True)])["a"]
    assert len(answer.token_ids) == 4
    assert seen == ["launch", "launch", "read", "launch", "read", "launch", "read", "read"]


def test_how_each_step_was_launched_is_counted(random_llama: Path) -> None:
    engine = engine_of(random_llama, 1)
    run(engine, three())
    assert engine.stats()["overlap"] == {"idle": 1, "overlapped": 5}
    run(engine, three(presence_penalty=1.0))
    assert engine.stats()["overlap"] == {"idle": 2, "overlapped": 5, "penalties": 5}


def test_an_end_token_is_seen_one_step_late_and_the_extra_one_is_dropped(tmp_path: Path) -> None:
    says, _ = tiny_models.script(tmp_path, ["a", "b", "</s>"])
    found = {}
    for depth in (0, 1):
        engine = engine_of(tmp_path, depth)
        (answer,) = engine.generate([":"])
        assert answer.finish_reason == "stop" and answer.text == "ab"
        assert_empty(engine)
        found[depth] = sum(engine.counters.steps.values()), engine.counters.generation_tokens
    assert found[1] == (found[0][0] + 1, found[0][1])
    assert len(says) == found[1][1]


def test_a_stop_string_ends_the_text_where_it_does_at_depth_0(tmp_path: Path) -> None:
    tiny_models.script(tmp_path, list("abcdefgh"))
    texts = []
    for depth in (0, 1):
        engine = engine_of(tmp_path, depth)
        (answer,) = engine.generate([":"], stop=["de"])
        texts.append((answer.text, answer.finish_reason))
        assert_empty(engine)
    assert texts[0] == texts[1] == ("abc", "stop")


@pytest.fixture
def quiet() -> Iterator[None]:
    """Failures are logged with their tracebacks, which these tests plant."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def three(**sampling: Any) -> list[Request]:
    return [
        request(f"r{i}", [5 + i] * 5, max_tokens=6, ignore_eos=True, **sampling) for i in range(3)
    ]


@pytest.mark.usefixtures("quiet")
def test_a_step_that_fails_leaves_the_tokens_of_the_step_before_it(
    random_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(random_llama, 1, runner="eager")
    expected = run(engine, three())
    forward, calls = engine.model.forward, iter(range(1000))

    def failing(*args: Any) -> Logits:
        if next(calls) in (3, 4):  # the fourth step, and its retry
            raise RuntimeError("planted")
        return forward(*args)

    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "forward", failing)
        failed = run(engine, three())
    for name, answer in failed.items():
        assert answer.finish_reason is FinishReason.ERROR and "planted" in (answer.error or "")
        assert answer.token_ids == expected[name].token_ids[:3]
    assert_same(run(engine, three()), expected)


@pytest.mark.usefixtures("quiet")
def test_a_device_that_fails_after_the_launch_ends_the_requests_of_that_step(
    random_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(random_llama, 1)
    expected = run(engine, three())
    to_host, calls = DeviceSampled.to_host, iter(range(1000))

    def failing(self: DeviceSampled) -> Any:
        if next(calls) == 2:
            raise RuntimeError("planted")
        return to_host(self)

    with monkeypatch.context() as patch:
        patch.setattr(DeviceSampled, "to_host", failing)
        for each in three():
            engine.submit(each)
        answers: dict[str, Answer] = {}
        for _ in range(4):
            collect(answers, engine.step())
        late = request("late", [9] * 3, max_tokens=6, ignore_eos=True)
        engine.submit(late)
        finish(engine, answers)
    assert len(answers.pop("late").token_ids) == 6
    for name, answer in answers.items():
        assert answer.finish_reason is FinishReason.ERROR
        assert answer.token_ids == expected[name].token_ids[:2]


def test_a_row_that_is_not_finite_ends_its_own_request_only(
    random_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(random_llama, 1, runner="eager")
    expected = run(engine, three(temperature=1.0, seed=4))
    forward = engine.model.forward

    def poisoned(batch: ForwardBatch, *args: Any) -> Logits:
        logits = forward(batch, *args).values
        if batch.num_rows == 3 and batch.kv_lens[0] == 8:
            logits[1, 7] = float("nan")
        return Logits(logits)

    monkeypatch.setattr(engine.model, "forward", poisoned)
    found = run(engine, three(temperature=1.0, seed=4))
    assert found["r1"].finish_reason is FinishReason.ERROR
    assert found["r1"].token_ids == expected["r1"].token_ids[:3]
    for name in ("r0", "r2"):
        assert found[name].token_ids == expected[name].token_ids


def test_an_id_may_be_used_again_while_the_step_of_its_cancelled_request_runs(
    engine: Engine,
) -> None:
    expected = run(engine, [request("a", [8, 9], max_tokens=5, ignore_eos=True)])
    engine.submit(request("a", [5, 6, 7], max_tokens=9, ignore_eos=True))
    for _ in range(3):
        engine.step()
    engine.cancel("a")
    (ended,) = engine.step()
    assert ended.finish_reason is FinishReason.CANCELLED
    engine.submit(request("a", [8, 9], max_tokens=5, ignore_eos=True))
    assert_same(finish(engine), expected)


def test_a_request_resumes_where_it_was(engine: Engine, expected: dict[str, Answer]) -> None:
    whole = next(each for each in requests() if each.id.startswith("seeded"))
    said = expected[whole.id].token_ids
    resumed = Request(
        id="again", prompt_ids=whole.prompt_ids, output_ids=tuple(said[:2]), sampling=whole.sampling
    )
    answer = run(engine, [resumed])["again"]
    assert answer.first_position == 2
    assert answer.token_ids == said[2:]


def test_speeds_are_those_of_steps_that_were_waited_for(engine: Engine) -> None:
    run(engine, [request("a", [5] * 20, max_tokens=6, ignore_eos=True)])
    assert engine.last_step.num_tokens == 1 and engine.last_step.is_decode
    assert engine.last_step.seconds > 0
    assert engine.speeds.speeds().prefill_tokens_s > 0


def test_depth_0_counts_no_overlap_and_samples_on_the_host(random_llama: Path) -> None:
    engine = engine_of(random_llama, 0)
    run(engine, three())
    assert engine.stats()["overlap"] == {}
    assert not isinstance(engine._sampler, DeviceSampler)
    with pytest.raises(ConfigurationError, match="overlap_depth is 2"):
        EngineConfig(model="", overlap_depth=2)


def test_drawn_tokens_replace_what_stands_for_them(engine: Engine) -> None:
    states = [RequestState(request(str(i), [5, 6, 7]), i, 64) for i in range(3)]
    for i, state in enumerate(states):
        state.pages, state.num_computed = [1 + i], 2
    states[0].expect(1)
    states[2].expect(0)
    for state in (states[0], states[2]):
        state.num_computed += 1
    batch = ForwardBatch.build(
        [ScheduledRow(state, 1) for state in states], page_size=4, device=torch.device("cpu")
    )
    assert batch.input_ids.tolist() == [-2, 7, -1]
    assert batch.with_drawn(torch.tensor([30, 40])).input_ids.tolist() == [40, 7, 30]
    states[0].resolve(40)
    assert (states[0].output_ids, states[2].output_ids) == ([40], [])
    states[2].drop_pending()
    assert states[2].token_ids == [5, 6, 7]
