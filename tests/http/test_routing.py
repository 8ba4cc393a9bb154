"""Routing over HTTP: headers that require, prefer and explain; the queue; what metrics count."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from polypath.deployments import stream
from polypath.deployments.api_settings import ApiSettings
from polypath.deployments.gateway import Gateway
from polypath.deployments.router import RoutingRules
from polypath.deployments.routes import build_api
from polypath.runtime.checkpoint.source import Checkpoint
from polypath.runtime.errors import QueueFullError
from polypath.tests.http.fakes import Call, FakeLink, Serve, check_error, client_of
from polypath.tests.paced import PacedLink

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 4, "ignore_eos": True}


async def fleet(tiny: Checkpoint, *links: PacedLink, **settings: Any) -> Gateway:
    gateway = Gateway(ApiSettings(**settings))
    gateway.add_checkpoint(tiny, name="tiny")
    for link in links:
        await gateway.add_worker(link)
    return gateway


async def ask(gateway: Gateway, headers: dict[str, str] | None = None, **body: Any) -> Any:
    async with client_of(gateway) as client:
        return await client.post("/v1/completions", json=BODY | body, headers=headers or {})


async def metric(gateway: Gateway, name: str, label: str) -> dict[str, float]:
    """The values of a metric by one of its labels."""
    async with client_of(gateway) as client:
        text = (await client.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith(name + "{")]
    return {
        line.partition(f'{label}="')[2].partition('"')[0]: float(line.rpartition(" ")[2])
        for line in lines
    }


async def test_a_requirement_picks_the_worker_that_meets_it(tiny: Checkpoint) -> None:
    plan = {"device": "cuda", "paths": {}}
    fast, slow = PacedLink("fast", 0.0001, plan=plan), PacedLink("slow", 0.001, pool="old")
    gateway = await fleet(tiny, fast, slow)
    for requires, worker in [("device=cpu", "slow"), ("pool=old", "slow"), ("", "fast")]:
        response = await ask(gateway, {"x-polypath-require": requires})
        assert response.headers["x-polypath-worker"] == worker
    assert await metric(gateway, "polypath_gateway_routes_total", "reason") == {
        "only_capable": 2.0,
        "fastest": 1.0,
    }
    gateway.close()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_what_no_worker_can_serve_is_a_400_that_says_what_each_lacks(
    tiny: Checkpoint, is_stream: bool
) -> None:
    gateway = await fleet(tiny, PacedLink("one"), PacedLink("two", features=["penalties"]))
    headers = {"x-polypath-require": "device=cuda"}
    response = await ask(gateway, headers, stream=is_stream, logprobs=1)
    check_error(response, 400, "x-polypath-require", "one: device is cpu, not cuda.")
    check_error(response, 400, "x-polypath-require", "two: it has no logprobs; device is cpu")
    assert response.json()["error"]["code"] == "no_capable_worker"
    refused = await metric(gateway, "polypath_gateway_refused_answers_total", "kind")
    assert refused == {"no_capable_worker": 1.0}
    gateway.close()


async def test_a_wrong_header_is_a_400_that_names_it(tiny: Checkpoint) -> None:
    gateway = await fleet(tiny, PacedLink("one"))
    for header, value in [
        ("x-polypath-require", "speed=9"),
        ("x-polypath-prefer", "a, a"),
        ("x-polypath-prefer", "a; spill=maybe"),
        ("x-polypath-prefer", "a b"),
        ("x-polypath-debug", "all"),
        ("x-polypath-goal", "soon"),
        ("x-polypath-goal", "0"),
        ("x-polypath-goal", "1e9"),
    ]:
        response = await ask(gateway, {header: value})
        check_error(response, 400, header, header)
    gateway.close()


async def test_the_route_is_explained_when_asked(tiny: Checkpoint) -> None:
    links = (PacedLink("near", 0.001), PacedLink("far", 0.002), PacedLink("tiny", max_model_len=2))
    gateway = await fleet(tiny, *links)
    assert "x-polypath-route" not in (await ask(gateway)).headers
    for is_stream in (False, True):
        response = await ask(gateway, {"x-polypath-debug": "route"}, stream=is_stream)
        route = json.loads(response.headers["x-polypath-route"])
        assert route["worker"] == "near"
        assert route["reason"] == "fastest"
        near, far, small = route["candidates"]
        assert 0 < near["seconds"] < far["seconds"]
        assert small == {"worker": "tiny", "refused": ["it holds 2 tokens of 5"]}
    gateway.close()


async def test_an_explanation_of_very_many_workers_stays_short(tiny: Checkpoint) -> None:
    gateway = await fleet(tiny, *(PacedLink(f"worker-{n:04d}", 0.001) for n in range(200)))
    response = await ask(gateway, {"x-polypath-debug": "route"})
    route = json.loads(response.headers["x-polypath-route"])
    assert len(response.headers["x-polypath-route"]) <= 4096
    assert len(route["candidates"]) + route["left_out"] == 200
    gateway.close()


async def test_a_request_may_have_its_own_order_of_pools(tiny: Checkpoint) -> None:
    cheap, dear = PacedLink("cheap", 0.002, pool="cheap"), PacedLink("dear", 0.001, pool="dear")
    gateway = await fleet(tiny, cheap, dear)
    gateway.models["tiny"].rules = RoutingRules(prefer=("dear",))
    assert (await ask(gateway)).headers["x-polypath-worker"] == "dear"
    response = await ask(gateway, {"x-polypath-prefer": "cheap, dear; spill=no"})
    assert response.headers["x-polypath-worker"] == "cheap"
    assert (await metric(gateway, "polypath_gateway_routes_total", "reason")) == {"preferred": 2.0}
    gateway.close()


@pytest.mark.parametrize("way", ["header", "deadline", "setting"])
async def test_a_goal_that_waiting_would_miss_takes_the_slower_worker(
    tiny: Checkpoint, way: str
) -> None:
    """The fast one would be done in 0.24 s, the slow one in 0.8 s."""
    links = [PacedLink("fast", 0.005, max_num_seqs=1), PacedLink("slow", 0.1)]
    gateway = await fleet(tiny, *links, goal_s=0.2 if way == "setting" else None)
    app = build_api(gateway)
    headers = {"header": {"x-polypath-goal": "0.2"}, "deadline": {"X-Request-Timeout": "0.2"}}
    busy = [Call(app, "POST", "/v1/completions", BODY | {"max_tokens": 20}) for _ in range(2)]
    while links[0].num_held != 2:
        await asyncio.sleep(0)
    response = await ask(gateway, headers.get(way, {}), max_tokens=8, stream=True)
    assert response.headers["x-polypath-worker"] == "slow"
    assert "late" in await metric(gateway, "polypath_gateway_routes_total", "reason")
    await asyncio.gather(*(call.task for call in busy))
    gateway.close()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_deadline_that_passes_in_the_queue_is_a_504_and_leaves_the_queue(
    tiny: Checkpoint, is_stream: bool
) -> None:
    link = PacedLink("w", 0.05, max_num_seqs=1)
    gateway = await fleet(tiny, link)
    calls = [Call(build_api(gateway), "POST", "/v1/completions", BODY) for _ in range(6)]
    line = gateway.models["tiny"].line
    while len(line) < 4:
        await asyncio.sleep(0)
    response = await ask(gateway, {"X-Request-Timeout": "0.15"}, stream=is_stream)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"
    assert len(line) <= 4
    await asyncio.gather(*(call.task for call in calls))
    assert len(link.requests) == 6, "the late one never began"
    gateway.close()


async def test_a_full_worker_is_passed_over_before_the_first_token(tiny: Checkpoint) -> None:
    full, other = FakeLink(worker_id="full"), PacedLink("other", 0.001)
    full.raises = QueueFullError("somebody else filled it", 1.0)
    gateway = Gateway()
    gateway.add_checkpoint(tiny, name="tiny")
    await gateway.add_worker(full)
    await gateway.add_worker(other)
    gateway.models["tiny"].rules = RoutingRules(prefer=("",))
    for _ in range(3):
        response = await ask(gateway)
        assert response.status_code == 200
        assert response.json()["polypath"]["trail"] == ["other"]
    gateway.close()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_full_queue_is_a_429_from_measured_waiting(
    tiny: Checkpoint, is_stream: bool
) -> None:
    gateway = await fleet(tiny, PacedLink("w", 0.05, max_num_seqs=1), max_queued=2)
    app = build_api(gateway)
    calls = [Call(app, "POST", "/v1/completions", BODY) for _ in range(4)]
    line = gateway.models["tiny"].line
    while len(line) < 2:
        await asyncio.sleep(0)
    assert await metric(gateway, "polypath_gateway_waiting", "model") == {"tiny": 2.0}
    response = await ask(gateway, stream=is_stream)
    check_error(response, 429, None, "2 answers wait here, and the limit is 2")
    assert int(response.headers["retry-after"]) >= 1
    refused = await metric(gateway, "polypath_gateway_refused_answers_total", "kind")
    assert refused == {"queue_full": 1.0}
    await calls[3].leave()
    assert len(line) == 1
    for call in calls[:3]:
        await call.task
    assert all(worker.num_in_flight == 0 for worker in gateway.all_workers())
    gateway.close()


async def test_a_stream_that_waits_long_gets_its_headers_and_comments(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "COMMENT_S", 0.02)
    settings = {"queue_headers_after_s": 0.05, "headers_after_s": 0.01}
    gateway = await fleet(tiny, PacedLink("w", 0.05, max_num_seqs=1), **settings)
    app = build_api(gateway)
    first = [Call(app, "POST", "/v1/completions", BODY) for _ in range(3)]
    while len(gateway.models["tiny"].line) < 1:
        await asyncio.sleep(0)
    late = Call(app, "POST", "/v1/completions", BODY | {"stream": True})
    await late.until(3)
    assert late.messages[0]["status"] == 200
    assert b"x-polypath-worker" not in dict(late.messages[0]["headers"])
    assert late.text.startswith(": waiting for a worker\n\n")
    await asyncio.gather(late.task, *(call.task for call in first))
    assert late.text.endswith("data: [DONE]\n\n")
    last = json.loads(late.text.split("\n\n")[-3].removeprefix("data: "))
    assert last["polypath"]["trail"] == ["w"]
    gateway.close()


async def test_a_storm_of_leavers_empties_queue_and_workers(serve: Serve) -> None:
    links = [FakeLink(worker_id=f"w{n}", step_s=0.002, max_num_seqs=2) for n in range(2)]
    gateway = await serve(*links, settings=ApiSettings(max_queued=500))
    app = build_api(gateway)
    body = BODY | {"max_tokens": 100, "stream": True, "n": 2}
    calls = [Call(app, "POST", "/v1/completions", body) for _ in range(60)]
    while len(gateway.models["tiny"].line) < 100:
        await asyncio.sleep(0.01)
    for number, call in enumerate(calls):
        await call.leave()
        if number % 7 == 0:
            await asyncio.sleep(0.003)
    assert len(gateway.models["tiny"].line) == 0
    assert all(not link.running for link in links)
    assert all(worker.num_in_flight == 0 for worker in gateway.all_workers())
    assert (await ask(gateway)).status_code == 200
