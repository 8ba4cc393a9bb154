"""Workers that die, move their streams away or stall in the middle: the answer is the undisturbed
one, token by token, on real engines.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from polypath.actors.worker import Worker
from polypath.deployments.api_settings import ApiSettings
from polypath.deployments.gateway import Gateway
from polypath.deployments.routes import build_api
from polypath.tests import tiny_models
from polypath.tests.breaking import DIES, MOVES, STALLS, BreakingLink, Script, shared
from polypath.tests.http.fakes import Call, client_of, events
from polypath.tests.http.live import start_worker, until_idle

pytestmark = pytest.mark.anyio

Workers = Sequence[Worker]
GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
SEEDED = {"temperature": 1.0, "seed": 7, "max_tokens": 12, "ignore_eos": True}
CASES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "top-k": SEEDED | {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": GREEDY | {"presence_penalty": 1.5, "frequency_penalty": 1.0},
    "repetition": SEEDED | {"repetition_penalty": 1.8, "logit_bias": {"70": 3.0}},
    "logprobs": SEEDED | {"logprobs": 3},
    "echo": GREEDY | {"logprobs": 2, "echo": True},
    "two": SEEDED | {"n": 2, "logprobs": 1},
    "two prompts": SEEDED | {"prompt": ["first one", "and a second"], "n": 2},
    "min_tokens": SEEDED | {"min_tokens": 9, "ignore_eos": False, "logit_bias": {"1": 4.0}},
    "usage": SEEDED | {"stream_options": {"include_usage": True}},
    "to the end of the context": {"temperature": 0.0, "ignore_eos": True, "prompt": "x" * 84},
}


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Three equal ones over a random model, without a prefix cache: all runs count alike."""
    yield from _started(tmp_path_factory.mktemp("random"), 3, prefix_cache=False)


@pytest.fixture(scope="module")
def caching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Two with a prefix cache."""
    yield from _started(tmp_path_factory.mktemp("caching"), 2)


def _started(folder: Path, count: int, **options: Any) -> Iterator[Workers]:
    tiny_models.random(folder)
    started = [
        start_worker(folder, max_model_len=96, max_num_seqs=8, **options) for _ in range(count)
    ]
    yield started
    for worker in started:
        worker.stop()


@asynccontextmanager
async def serving(
    links: Sequence[BreakingLink], worker: Worker, **settings: Any
) -> AsyncIterator[Gateway]:
    given: dict[str, Any] = {"stranded_s": 0.2} | settings
    gateway = Gateway(ApiSettings(**given))
    gateway.add_checkpoint(worker.engine.checkpoint, name="tiny")
    for link in links:
        await gateway.add_worker(link)
    yield gateway
    gateway.close()


async def answer_of(
    workers: Workers, script: Script, body: dict[str, Any], **settings: Any
) -> dict[str, Any]:
    """The whole answer of a fleet whose streams break by `script`, and nothing left behind."""
    async with serving(shared(workers, script), workers[0], **settings) as gateway:
        async with client_of(gateway) as client:
            response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        model = gateway.models["tiny"]
        assert len(model.line) == 0
        assert all(not worker.jobs for worker in model.workers.values())
    for worker in workers:
        await until_idle(worker)
    if body.get("stream"):
        return _joined(events(response.text))
    return response.json()


def _joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """A stream as one body: texts of each choice, the last chunk's account."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return {
        "choices": [texts],
        "usage": chunks[-1].get("usage"),
        "polypath": chunks[-1]["polypath"],
    }


@pytest.mark.parametrize("body", CASES.values(), ids=CASES)
async def test_a_broken_answer_is_the_undisturbed_one(
    workers: Workers, body: dict[str, Any]
) -> None:
    """Killed after so many tokens; 0 is between prefill's end and the first chunk."""
    body = {"prompt": "Once upon", "stream": "stream_options" in body} | body
    expected = await answer_of(workers, Script(), body)
    assert "resumed" not in expected["polypath"]
    shortest = expected["usage"]["completion_tokens"] // len(expected["choices"])
    for num_outputs in range(0, min(shortest, 12), 4 if "n" in body else 3):
        script = Script((num_outputs, DIES))
        answer = await answer_of(workers, script, body)
        assert set(script.num_attempts()) == {2}
        assert answer["choices"] == expected["choices"]
        assert answer["usage"] == expected["usage"]
        for resumed in answer["polypath"]["resumed"]:
            assert resumed["position"] == num_outputs
            assert resumed["changed"] == {}


@pytest.mark.parametrize("how", [DIES, MOVES])
async def test_the_resuming_worker_may_fall_too(workers: Workers, how: str) -> None:
    body = {"prompt": "And then"} | SEEDED | {"presence_penalty": 1.0}
    expected = await answer_of(workers, Script(), body)
    answer = await answer_of(workers, Script((4, how), (3, how)), body)
    assert answer["choices"] == expected["choices"]
    assert [each["position"] for each in answer["polypath"]["resumed"]] == [4, 7]
    assert len(set(answer["polypath"]["trail"])) == 3
    because = {each["because"] for each in answer["polypath"]["resumed"]}
    assert because == {"the worker died" if how == DIES else "it was drained"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_completes_over_a_resume(tmp_path: Path, stream: bool) -> None:
    """Its first half came from the worker that died, and no character of it is given out."""
    tiny_models.script(tmp_path, ["abcdefgh"])
    pair = [start_worker(tmp_path, max_num_seqs=2) for _ in range(2)]
    body = {"prompt": "go:", "stop": ["def"], "max_tokens": 20, "temperature": 0, "stream": stream}
    expected = await answer_of(pair, Script(), body)
    for num_outputs in range(6):
        answer = await answer_of(pair, Script((num_outputs, DIES)), body)
        assert answer["choices"] == expected["choices"]
        assert answer["usage"] == expected["usage"]
    for worker in pair:
        worker.stop()


async def test_half_an_emoji_survives(tmp_path: Path) -> None:
    tiny_models.script(tmp_path, ["a\U0001f600b", "</s>"])
    pair = [start_worker(tmp_path, max_num_seqs=2) for _ in range(2)]
    body = {"prompt": "go:", "max_tokens": 20, "temperature": 0, "stream": True}
    for num_outputs in range(7):
        answer = await answer_of(pair, Script((num_outputs, DIES)), body)
        assert answer["choices"] == [{0: "a\U0001f600b"}]
    for worker in pair:
        worker.stop()


async def test_cached_tokens_are_those_of_the_first_worker(caching: Workers) -> None:
    """The second one had the prompt in its cache; the client's prompt was computed all the same."""
    body = {"prompt": "a prompt that fills more than a single page of keys"} | GREEDY
    warm = shared(caching[1:], Script())
    async with serving(warm, caching[0]) as gateway, client_of(gateway) as client:
        first = (await client.post("/v1/completions", json=body)).json()
        again = (await client.post("/v1/completions", json=body)).json()
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (first, again)]
    assert cached[0] == 0 < cached[1]
    links = shared(caching, Script((5, DIES)))
    async with serving(links[:1], caching[0]) as gateway, client_of(gateway) as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        while not links[0].script.num_attempts():
            await asyncio.sleep(0)
        await gateway.add_worker(links[1])
        answer = (await asking).json()
    assert len(answer["polypath"]["trail"]) == 2
    assert answer["choices"][0]["text"] == first["choices"][0]["text"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_drained_worker_finishes_what_it_can_and_hands_over_the_rest(
    tmp_path: Path,
) -> None:
    """The short answer ends on it, the long one goes on elsewhere, and nothing new comes."""
    tiny_models.random(tmp_path)
    pair = [start_worker(tmp_path, max_model_len=400, prefix_cache=False) for _ in range(2)]
    long = {"prompt": "Long", "temperature": 0.0, "ignore_eos": True, "max_tokens": 300}
    expected = await answer_of(pair, Script(), long)
    links = shared(pair, Script())
    async with serving(links[:1], pair[0]) as gateway, client_of(gateway) as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=long))
        while not pair[0].num_open():
            await asyncio.sleep(0)
        await gateway.add_worker(links[1])
        await pair[0].drain(0.0)
        answer = (await asking).json()
        (resumed,) = answer["polypath"]["resumed"]
        assert resumed["because"] == "it was drained"
        assert resumed["from"] == pair[0].worker_id
        assert answer["choices"] == expected["choices"]
        num_steps = sum(step["steps"] for step in answer["polypath"]["steps"])
        assert num_steps == 300, "those of both workers, one for each token"
        again = (await client.post("/v1/completions", json=long | {"max_tokens": 3})).json()
        assert again["polypath"]["trail"] == [pair[1].worker_id]
    for worker in pair:
        worker.stop()


async def test_a_stalled_worker_that_comes_back_changes_nothing(workers: Workers) -> None:
    body = {"prompt": "Silence", "stream": True} | SEEDED
    expected = await answer_of(workers, Script(), body)
    links = shared(workers, Script((4, STALLS)))
    async with serving(links, workers[0], silence_s=0.1, stats_timeout_s=0.1) as gateway:
        running = Call(build_api(gateway), "POST", "/v1/completions", body)
        while links[0].script.num_attempts() != [2]:
            await asyncio.sleep(0.01)
        for link in links:  # the old attempt's tokens arrive now, if anybody listened
            link.released.set()
        await running.task
    answer = _joined(events(running.text))
    assert answer["choices"] == expected["choices"]
    (resumed,) = answer["polypath"]["resumed"]
    assert "gone silent" in resumed["because"]
    for worker in workers:
        await until_idle(worker)


async def test_a_worker_that_only_takes_long_is_not_left(workers: Workers) -> None:
    """The stream is silent, and the worker answers for itself."""
    script = Script((4, STALLS))
    links = shared(workers, script)
    async with serving(links, workers[0], silence_s=0.05, stats_timeout_s=0.1) as gateway:
        body = {"prompt": "Patience"} | SEEDED
        running = Call(build_api(gateway), "POST", "/v1/completions", body)
        while not any(link.is_silent for link in links):
            await asyncio.sleep(0.01)
        for link in links:
            link.is_silent = False
        await asyncio.sleep(0.3)
        for link in links:
            link.released.set()
        await running.task
    assert script.num_attempts() == [1]
    assert "resumed" not in json.loads(running.text)["polypath"]


async def test_when_no_worker_is_left_a_stream_ends_in_an_error_event(workers: Workers) -> None:
    script = Script(*[(2, DIES)] * 5)
    links = shared(workers[:2], script)
    body = {"prompt": "Alone", "stream": True} | GREEDY
    async with serving(links, workers[0]) as gateway, client_of(gateway) as client:
        response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200
    last = response.text.strip().split("\n\n")[-1]
    assert last.startswith("event: error")
    assert "the worker died" in last
    assert script.num_attempts() == [2]
    for worker in workers:
        await until_idle(worker)


async def test_attempts_are_bounded_and_before_the_first_token_it_is_a_503(
    workers: Workers,
) -> None:
    script = Script(*[(0, DIES)] * 9)
    links = [link for _ in range(3) for link in shared(workers, script)]
    for number, link in enumerate(links):
        link._described = {"worker_id": f"worker-{number}"}
    async with serving(links, workers[0], max_resumes=3) as gateway, client_of(gateway) as client:
        response = await client.post("/v1/completions", json={"prompt": "Poison"} | GREEDY)
    assert response.status_code == 503
    assert script.num_attempts() == [4]


async def test_a_change_of_class_is_told(workers: Workers) -> None:
    links = shared(workers[:2], Script((3, DIES)))
    links[1]._described = {"batch_invariant": False}
    links[0]._described = {"batch_invariant": True, "calibration": {"concurrency": 99}}
    body = {"prompt": "Change", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    fleet = serving([links[0]], workers[0], same_class_s=0.0)
    async with fleet as gateway, client_of(gateway) as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        while not links[0].script.num_attempts():
            await asyncio.sleep(0)
        await gateway.add_worker(links[1])
        answer = (await asking).json()
    (resumed,) = answer["polypath"]["resumed"]
    assert resumed["changed"] == {"batch_invariant": [True, False]}


async def test_leaving_in_the_middle_of_a_resume_leaves_nothing(workers: Workers) -> None:
    links = shared(workers, Script((3, DIES)))
    async with serving(links[:1], workers[0], stranded_s=30.0) as gateway:
        body = {"prompt": "Leaving", "stream": True, "n": 2} | SEEDED
        running = Call(build_api(gateway), "POST", "/v1/completions", body)
        line = gateway.models["tiny"].line
        while len(line) < 2:  # both broke, and wait for another worker
            await asyncio.sleep(0.01)
        await running.leave()
        assert len(line) == 0
        assert all(not worker.jobs for worker in gateway.all_workers())
    await until_idle(workers[0])
