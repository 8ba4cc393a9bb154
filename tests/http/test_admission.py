"""A full queue refuses at once: before prompts are read, in a burst too, and whatever Ray does."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import httpx
import pytest

from polypath.deployments.api_settings import ApiSettings
from polypath.deployments.gateway import Gateway
from polypath.deployments.head_calls import HeadCalls
from polypath.deployments.routes import build_api
from polypath.tests.http.fakes import Call, FakeLink, Serve, client_of

pytestmark = pytest.mark.anyio

PROMPT = {"model": "tiny", "prompt": "hello", "max_tokens": 400}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 400}
PATHS = {"/v1/completions": PROMPT, "/v1/chat/completions": CHAT}


def endless() -> FakeLink:
    """One at once, one that its step does not wait for, and two that may queue."""
    return FakeLink("a" * 500, step_s=0.05, max_num_seqs=1, max_waiting=2)


ROOM = 4


@asynccontextmanager
async def stuck_readers(gateway: Gateway) -> AsyncIterator[None]:
    """All threads that read prompts have something long to do."""
    is_over = threading.Event()
    prompts = gateway.models["tiny"].prompts
    num = gateway.settings.tokenizer_threads
    tasks = [asyncio.create_task(prompts.run(lambda: is_over.wait(20))) for _ in range(num)]
    await asyncio.sleep(0)
    try:
        yield
    finally:
        is_over.set()
        await asyncio.gather(*tasks)


async def until(is_so: object, limit_s: float = 5.0) -> None:
    assert callable(is_so)
    deadline_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("path", PATHS)
async def test_a_burst_gets_no_more_places_than_there_are(serve: Serve, path: str) -> None:
    gateway = await serve(endless())
    api = build_api(gateway)
    for _ in range(2):  # every place is given back
        calls = [Call(api, "POST", path, PATHS[path]) for _ in range(12)]
        refused = [call for call in calls if call.messages]
        while len(refused) < 12 - ROOM:
            await asyncio.sleep(0.005)
            refused = [call for call in calls if call.messages]
        await asyncio.sleep(0.05)
        assert [call.messages[0]["status"] for call in refused] == [429] * (12 - ROOM)
        assert len(gateway.models["tiny"].line) == 2, "two run, two wait"
        for call in calls:
            await call.leave()


@pytest.mark.parametrize("path", PATHS)
async def test_what_waits_to_be_read_has_its_place_and_the_next_is_refused_at_once(
    serve: Serve, path: str
) -> None:
    gateway = await serve(endless())
    api = build_api(gateway)
    async with stuck_readers(gateway):
        first = [Call(api, "POST", path, PATHS[path]) for _ in range(ROOM)]
        await asyncio.sleep(0.05)
        next_one = Call(api, "POST", path, PATHS[path])
        await next_one.until(1)
        assert next_one.messages[0]["status"] == 429
        assert "4 answers wait here, and the limit is 4" in next_one.text
        assert not any(call.messages for call in first)
    await until(lambda: len(gateway.models["tiny"].line) == 2)
    assert not any(call.messages for call in first), "none of them is refused after that"
    for call in first:
        await call.leave()


@pytest.mark.parametrize("how", ["leaves", "late", "wrong", "too long"])
async def test_a_place_comes_back_from_who_never_gets_to_the_queue(serve: Serve, how: str) -> None:
    gateway = await serve(endless())
    api = build_api(gateway)
    body, headers = dict(PROMPT), {}
    if how == "late":
        headers = {"X-Request-Timeout": "0.1"}
    elif how == "wrong":
        body["prompt"] = [1, 10**9]
    elif how == "too long":
        body["prompt"] = "a" * 200
    async with stuck_readers(gateway):
        calls = [Call(api, "POST", "/v1/completions", body, headers) for _ in range(ROOM)]
        await asyncio.sleep(0.05)
        for call in calls:
            if how == "leaves":
                call.hang_up()
            elif how == "late":
                await call.until(1)
                assert call.messages[0]["status"] == 504
    for call in calls:
        if how == "leaves":
            await call.leave()
        elif how != "late":
            await call.until(1)
            assert call.messages[0]["status"] == 400
    line = gateway.models["tiny"].line
    assert len(line) == 0
    line.enter(ROOM).leave()  # all places are there, and not one more
    with pytest.raises(Exception, match="5 answers are too many"):
        line.enter(ROOM + 1)


async def test_several_answers_of_one_request_are_as_many_places(serve: Serve) -> None:
    gateway = await serve(endless())
    async with client_of(gateway) as client:
        many = {**PROMPT, "prompt": ["a", "b", "c"], "n": 2}
        assert (await client.post("/v1/completions", json=many)).status_code == 400
        two = Call(build_api(gateway), "POST", "/v1/completions", {**PROMPT, "n": 2})
        await until(lambda: gateway.all_workers()[0].jobs)
        three = {**PROMPT, "prompt": ["a", "b", "c"]}
        assert (await client.post("/v1/completions", json=three)).status_code == 429
        await two.leave()


async def test_what_nobody_can_serve_is_refused_at_once_behind_a_long_queue(serve: Serve) -> None:
    """Of those that wait only the first few are looked at each time."""
    gateway = await serve(FakeLink("a" * 500, step_s=0.05, max_num_seqs=1, max_waiting=200))
    api = build_api(gateway)
    calls = [Call(api, "POST", "/v1/completions", PROMPT) for _ in range(90)]
    await until(lambda: len(gateway.models["tiny"].line) == 88)
    async with client_of(gateway) as client:
        headers = {"x-polypath-require": "device=cuda"}
        answer = await client.post("/v1/completions", json=PROMPT, headers=headers)
    assert answer.status_code == 400 and len(gateway.models["tiny"].line) > 64
    assert answer.json()["error"]["code"] == "no_capable_worker"
    for call in calls:
        await call.leave()


async def test_texts_to_tokenize_have_a_queue_that_ends_too(serve: Serve) -> None:
    gateway = await serve(FakeLink())
    body = {"model": "tiny", "prompt": "hello"}
    async with client_of(gateway) as client:
        async with stuck_readers(gateway):
            calls = [asyncio.create_task(client.post("/tokenize", json=body)) for _ in range(64)]
            await asyncio.sleep(0.2)
            back = {"model": "tiny", "tokens": [5]}
            full = [await client.post("/tokenize", json=body)]
            full.append(await client.post("/detokenize", json=back))
            for each in full:
                assert each.status_code == 429 and each.headers["retry-after"] == "1"
                assert "64 texts wait to be tokenized here" in each.text
        assert {(await call).status_code for call in calls} == {200}
        assert (await client.post("/detokenize", json=back)).status_code == 200


async def test_a_silent_ray_keeps_neither_metrics_nor_large_requests_waiting(serve: Serve) -> None:
    """Its head does not answer for a minute when it is busy, or gone."""
    gateway = await serve(FakeLink(), settings=ApiSettings(tokenizer_threads=1))
    is_over = threading.Event()

    def silent() -> dict[str, object]:
        is_over.wait(20)
        return {}

    gateway.read_scaling, gateway._head = silent, HeadCalls("test", limit_s=1.5)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4))
    async with client_of(gateway) as client:
        scrapes = [asyncio.create_task(client.get("/metrics")) for _ in range(12)]
        await asyncio.sleep(0.05)
        large = {"model": "tiny", "prompt": "a" * 100_000, "max_tokens": 1}
        answer = await client.post("/v1/completions", json=large)
        assert answer.status_code == 400 and not any(scrape.done() for scrape in scrapes)
        answers = await asyncio.gather(*scrapes)
        assert {each.status_code for each in answers} == {200}
        assert "polypath_worker_up" in answers[0].text
        gateway._head = HeadCalls("test", limit_s=0.1)
        scaling: httpx.Response = await client.get("/admin/scaling")
        assert scaling.status_code == 503 and "Ray's head" in scaling.text
    is_over.set()
