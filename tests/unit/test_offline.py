"""`Engine.generate`: batches of prompts in process, in their order, with stop strings."""

from __future__ import annotations

from pathlib import Path

import pytest

from polypath.runtime.engine import Engine
from polypath.runtime.errors import ContextLengthError, EngineError, RequestError
from polypath.runtime.request import FinishReason, SamplingParams
from polypath.tests import tiny_models
from polypath.tests.driving import assert_empty, build_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Says "abcdefgh" after a colon, then ends."""
    folder = tmp_path_factory.mktemp("script")
    tiny_models.script(folder, ["abcdefgh", "</s>"])
    return build_engine(folder, pages=40, max_num_seqs=2, max_waiting=1)


def test_answers_texts_and_ids_in_their_order_however_many_there_are(speaker: Engine) -> None:
    prompts = [f"{i}:" for i in range(9)]
    found = speaker.generate([*prompts, [4 + ord(":")]], GREEDY)
    assert [answer.text for answer in found] == ["abcdefgh"] * 10
    assert [answer.finish_reason for answer in found] == [FinishReason.STOP] * 10
    assert [bytes(i - 4 for i in a.prompt_ids).decode() for a in found[:9]] == prompts
    assert found[0].token_ids[-1] == 1
    assert_empty(speaker)


def test_each_prompt_may_have_its_own_params(speaker: Engine) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (1, 3, 12)]
    found = speaker.generate(["x:"] * 3, params)
    assert [a.text for a in found] == ["a", "abc", "abcdefgh"]
    assert [a.finish_reason.value for a in found] == ["length", "length", "stop"]


@pytest.mark.parametrize(
    ("stop", "text"), [(["de"], "abc"), (["a"], ""), (["z"], "abcdefgh"), (["gh", "fg"], "abcde")]
)
def test_a_stop_string_ends_an_answer_before_it_and_frees_its_pages(
    speaker: Engine, stop: list[str], text: str
) -> None:
    (found,) = speaker.generate(["x:"], GREEDY, stop=stop)
    assert (found.text, found.finish_reason) == (text, FinishReason.STOP)
    assert_empty(speaker)


def test_gives_logprobs_of_every_token_and_of_the_prompt(speaker: Engine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=1, prompt_logprobs=1)
    (found,) = speaker.generate(["xy:"], params)
    assert len(found.logprobs) == len(found.token_ids) == 3
    assert found.prompt_logprobs is not None
    assert len(found.prompt_logprobs) == 3


def test_one_prompt_that_cannot_run_stops_all_before_any_ran(speaker: Engine) -> None:
    with pytest.raises(ContextLengthError):
        speaker.generate(["x:", "y" * 5000], GREEDY)
    with pytest.raises(RequestError):
        speaker.generate("one string", GREEDY)
    assert not speaker.has_work()


def test_a_failing_step_is_an_engine_error_and_leaves_nothing_behind(
    random_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(random_llama, pages=40)

    def failing(*args: object) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "forward", failing)  # a graph never calls the model
        with pytest.raises(EngineError, match="no memory"):
            engine.generate([[5, 6], [7, 8]], GREEDY)
    assert_empty(engine)
    assert len(engine.generate([[5, 6]], GREEDY)[0].token_ids) == 12


def test_when_one_answer_fails_the_others_do_not_run_on_unseen(random_llama: Path) -> None:
    engine = build_engine(random_llama, pages=40)
    forbidding = SamplingParams(min_tokens=2, stop_token_ids=tuple(range(260)))
    with pytest.raises(EngineError, match="forbid every token"):
        engine.generate([[5, 6], [7, 8]], [SamplingParams(max_tokens=100), forbidding])
    assert not engine.has_work()
    assert_empty(engine)
