"""A gateway that stops tells every client so before it is gone, whether answers wait or run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from polypath.deployments.gateway import Gateway
from polypath.runtime.checkpoint.source import Checkpoint
from polypath.tests.http.fakes import FakeLink, Serve, client_of

pytestmark = pytest.mark.anyio

ENDLESS = {"prompt": "x", "ignore_eos": True, "max_tokens": 400}
STOPPING = "The server is stopping"


async def has_open(gateway: Gateway, count: int) -> None:
    while len(gateway.open_requests) < count:
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.02)


@pytest.mark.parametrize("extra", [{}, {"stream": True}, {"n": 3}])
async def test_what_waits_for_a_pool_to_wake_is_told_at_once(
    tiny: Checkpoint, extra: dict[str, Any]
) -> None:
    gateway = Gateway()
    gateway.add_checkpoint(tiny, name="tiny", wake_s=30.0, max_model_len=512)
    async with client_of(gateway) as client:
        waits = asyncio.create_task(client.post("/v1/completions", json=ENDLESS | extra))
        await has_open(gateway, 1)
        gateway.open_requests.end_waiting()
        answer = await waits
        late = await client.post("/v1/completions", json=ENDLESS)
    for each in (answer, late):
        assert (each.status_code, each.headers["retry-after"]) == (503, "5")
        assert STOPPING in each.text and each.json()["error"]["code"] == "shutting_down"
    assert not len(gateway.models["tiny"].line), "it is no demand any more"
    gateway.close()


async def test_what_runs_may_end_when_only_the_waiting_are_sent_away(serve: Serve) -> None:
    gateway = await serve(FakeLink(step_s=0.02))
    async with client_of(gateway) as client:
        body = ENDLESS | {"max_tokens": 5}
        runs = asyncio.create_task(client.post("/v1/completions", json=body))
        await has_open(gateway, 1)
        gateway.open_requests.end_waiting()
        answer = await runs
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 5


async def test_what_runs_ends_in_an_error_in_the_end_and_frees_its_worker(serve: Serve) -> None:
    link = FakeLink(step_s=0.02)
    gateway = await serve(link)
    async with client_of(gateway) as client:
        bodies = [ENDLESS, ENDLESS | {"stream": True}, ENDLESS | {"stream": True, "n": 2}]
        running = [asyncio.create_task(client.post("/v1/completions", json=b)) for b in bodies]
        await has_open(gateway, 3)
        await asyncio.sleep(0.1)
        await gateway.open_requests.end_all()
        assert not len(gateway.open_requests)
        whole, *streams = await asyncio.gather(*running)
    assert whole.status_code == 503 and STOPPING in whole.text
    for stream in streams:
        assert stream.status_code == 200, "the headers had gone"
        assert stream.text.count("event: error\n") == 1 and STOPPING in stream.text
        assert "[DONE]" not in stream.text
    assert not link.running and len(link.cancelled) == 4


async def test_a_refused_request_is_not_open(serve: Serve) -> None:
    gateway = await serve(FakeLink(max_num_seqs=1, max_waiting=0, step_s=0.05))
    async with client_of(gateway) as client:
        body = ENDLESS | {"max_tokens": 6}
        running = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in "ab"]
        await has_open(gateway, 2)
        assert (await client.post("/v1/completions", json=body)).status_code == 429
        assert len(gateway.open_requests) == 2
        assert {answer.status_code for answer in await asyncio.gather(*running)} == {200}
    assert not len(gateway.open_requests)
