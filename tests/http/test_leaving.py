"""Clients that leave and failures half way: the engine hears of it, nothing stays behind."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from polypath.deployments.gateway import Gateway
from polypath.deployments.routes import build_api
from polypath.tests.http.fakes import Call, FakeLink, Serve, client_of

pytestmark = pytest.mark.anyio

ENDLESS = {"prompt": "x", "ignore_eos": True, "max_tokens": 400}


def call(gateway: Gateway, **extra: Any) -> Call:
    return Call(build_api(gateway), "POST", "/v1/completions", ENDLESS | extra)


def assert_idle(gateway: Gateway, link: FakeLink) -> None:
    assert not link.running
    assert all(worker.num_in_flight == 0 for worker in gateway.all_workers())


@pytest.mark.parametrize(
    "extra", [{"stream": True}, {"stream": True, "n": 3}, {"stream": True, "prompt": ["a", "b"]}]
)
async def test_leaving_a_stream_cancels_all_its_answers(
    serve: Serve, extra: dict[str, Any]
) -> None:
    link = FakeLink(step_s=0.005)
    gateway = await serve(link)
    running = call(gateway, **extra)
    await running.until(3)
    await running.leave()
    assert sorted(link.cancelled) == sorted(request.id for request in link.requests)
    assert_idle(gateway, link)


@pytest.mark.parametrize("extra", [{}, {"n": 2}, {"stream": True}])
async def test_leaving_before_the_first_token_cancels(serve: Serve, extra: dict[str, Any]) -> None:
    link = FakeLink(first_step_s=10)
    gateway = await serve(link)
    running = call(gateway, **extra)
    while not link.running:
        await asyncio.sleep(0)
    await running.leave()
    assert_idle(gateway, link)
    assert sorted(link.cancelled) == sorted(request.id for request in link.requests)


async def test_leaving_an_unstreamed_answer_half_way_cancels(serve: Serve) -> None:
    link = FakeLink(step_s=0.005)
    gateway = await serve(link)
    running = call(gateway)
    await asyncio.sleep(0.1)
    await running.leave()
    assert not running.messages
    assert_idle(gateway, link)


async def test_the_servers_own_cancellation_cancels_too(serve: Serve) -> None:
    link = FakeLink(step_s=0.005)
    gateway = await serve(link)
    running = call(gateway, stream=True)
    await running.until(2)
    running.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running.task
    assert_idle(gateway, link)


async def test_leaving_ends_only_that_request_though_ids_are_the_same(serve: Serve) -> None:
    link = FakeLink(step_s=0.001)
    gateway = await serve(link)
    app = build_api(gateway)
    headers = {"x-request-id": "same"}
    body = ENDLESS | {"max_tokens": 20, "stream": True}
    calls = [Call(app, "POST", "/v1/completions", body, headers) for _ in range(10)]
    await calls[0].until(2)
    await calls[0].leave()
    await asyncio.gather(*(running.task for running in calls))
    answer_ids = set()
    for running in calls[1:]:
        assert running.text.endswith("data: [DONE]\n\n")
        answer_ids.add(json.loads(running.text.split("\n\n")[0].removeprefix("data: "))["id"])
        headers_sent = dict(running.messages[0]["headers"])
        assert headers_sent[b"x-request-id"] == b"same"
    assert len(answer_ids) == 9
    assert len({request.id for request in link.requests}) == 10
    assert len(link.cancelled) == 1  # prompts are read in threads: not always the first request
    assert_idle(gateway, link)


async def test_a_failure_after_the_first_token_is_an_error_event_and_the_end(serve: Serve) -> None:
    link = FakeLink("hello")
    link.fails_after = 2
    gateway = await serve(link)
    async with client_of(gateway) as client:
        response = await client.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert response.status_code == 200
    *chunks, last = [event for event in response.text.split("\n\n") if event]
    assert [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in chunks] == [
        "h",
        "e",
    ]
    kind, data = last.split("\n")
    assert kind == "event: error"
    error = json.loads(data.removeprefix("data: "))["error"]
    assert error["message"] == "the engine has stopped"
    assert error["code"] == "engine_error"
    assert_idle(gateway, link)


async def test_a_failure_of_one_answer_ends_the_others(serve: Serve) -> None:
    link = FakeLink("hello", step_s=0.001)
    link.fails_after = 2
    gateway = await serve(link)
    async with client_of(gateway) as client:
        response = await client.post("/v1/completions", json={"prompt": "x", "n": 3})
    assert response.status_code == 503
    assert_idle(gateway, link)


async def test_an_answer_that_the_worker_drops_is_an_error_not_a_short_answer(serve: Serve) -> None:
    link = FakeLink("hello", step_s=0.01)
    gateway = await serve(link)
    running = call(gateway, stream=True)
    await running.until(2)
    await link.cancel(link.requests[0].id)
    await running.task
    assert "event: error" in running.text
    assert "[DONE]" not in running.text


async def test_the_least_loaded_worker_takes_the_next_request(serve: Serve) -> None:
    links = [FakeLink(worker_id=f"w{n}", step_s=0.01) for n in range(3)]
    gateway = await serve(*links)
    app = build_api(gateway)
    calls = [Call(app, "POST", "/v1/completions", ENDLESS | {"stream": True}) for _ in range(6)]
    for running in calls:
        await running.until(1)
    assert [len(link.running) for link in links] == [2, 2, 2]
    for running in calls:
        await running.leave()
    gateway.remove_worker("w1")
    async with client_of(gateway) as client:
        for _ in range(4):
            response = await client.post("/v1/completions", json={"prompt": "x"})
            assert response.headers["x-polypath-worker"] in ("w0", "w2")
