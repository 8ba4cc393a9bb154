"""`X-Request-Timeout`: late requests end, say so, and leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import re
import time

import pytest

from polypath.deployments.routes import build_api
from polypath.tests.http.fakes import Call, FakeLink, Serve, client_of
from polypath.tests.http.keys import CHAT

pytestmark = pytest.mark.anyio

CHATS = "/v1/chat/completions"


async def ended(link: FakeLink) -> None:
    """Until the worker was told of every request that it is over."""
    async with asyncio.timeout(5):
        while link.running:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_stream", [True, False])
async def test_before_the_first_token_it_is_a_504(serve: Serve, is_stream: bool) -> None:
    link = FakeLink(first_step_s=30)
    gateway = await serve(link)
    async with client_of(gateway) as client:
        body = {**CHAT, "stream": is_stream}
        answer = await client.post(CHATS, json=body, headers={"X-Request-Timeout": "0.1"})
    assert answer.status_code == 504
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("timeout_error", "deadline_exceeded")
    assert "0.1 s" in error["message"]
    await ended(link)
    assert len(link.cancelled) == 1
    assert gateway.all_workers()[0].num_in_flight == 0


async def test_in_a_stream_it_is_an_error_event(serve: Serve) -> None:
    link = FakeLink("abc" * 100, step_s=0.02)
    call = Call(
        build_api(await serve(link)),
        "POST",
        CHATS,
        {**CHAT, "stream": True},
        {"X-Request-Timeout": "0.4"},
    )
    await asyncio.wait_for(call.task, 5)
    assert call.messages[0]["status"] == 200
    *chunks, last = [part for part in call.text.split("\n\n") if part]
    assert len(chunks) > 2
    assert last.startswith("event: error\ndata: ")
    assert json.loads(last.split("data: ")[1])["error"]["code"] == "deadline_exceeded"
    assert "[DONE]" not in call.text
    assert [message.get("more_body", False) for message in call.messages[-2:]] == [True, False]
    await ended(link)
    assert len(link.cancelled) == 1


async def test_a_whole_answer_of_which_the_deadline_passes_midway_is_a_504(serve: Serve) -> None:
    link = FakeLink("abc" * 100, step_s=0.02)
    async with client_of(await serve(link)) as client:
        answer = await client.post(CHATS, json=CHAT, headers={"X-Request-Timeout": "0.3"})
    assert answer.status_code == 504
    await ended(link)


@pytest.mark.parametrize("is_stream", [True, False])
async def test_in_time_changes_nothing(serve: Serve, is_stream: bool) -> None:
    async with client_of(await serve(FakeLink())) as client:
        body = {**CHAT, "stream": is_stream}
        answer = await client.post(CHATS, json=body, headers={"X-Request-Timeout": "20"})
    assert answer.status_code == 200
    assert "deadline" not in answer.text


@pytest.mark.parametrize("jump_s", [-3600, 3600])
async def test_the_wall_clock_may_jump_while_one_waits(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, jump_s: int
) -> None:
    """In the queue, on a worker, and in what a full queue says."""
    link = FakeLink("abc" * 100, step_s=0.02, max_num_seqs=1, max_waiting=1)
    gateway = await serve(link)
    api = build_api(gateway)
    real = time.time
    waiting = [Call(api, "POST", CHATS, CHAT, {"X-Request-Timeout": "0.6"}) for _ in range(3)]
    await asyncio.sleep(0.1)
    began_s = time.monotonic()
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    async with client_of(gateway) as client:
        full = await client.post(CHATS, json=CHAT)
        metrics = await client.get("/metrics")
        assert (await client.get("/health")).status_code == 200
    assert full.status_code == 429 and 1 <= int(full.headers["retry-after"]) < 10
    assert not re.search(r"^polypath\S* -", metrics.text, re.M), "nothing is negative"
    for call in waiting:
        await call.until(1)
        assert call.messages[0]["status"] == 504
    assert 0.3 < time.monotonic() - began_s < 3
    await ended(link)


@pytest.mark.parametrize("sent", ["", "soon", "0", "-1", "nan", "inf", "1e9", "1s", "0x1", "٣"])
async def test_what_is_no_time_is_refused(serve: Serve, sent: str) -> None:
    link = FakeLink()
    async with client_of(await serve(link)) as client:
        headers = [(b"X-Request-Timeout", sent.encode())]
        answer = await client.post(CHATS, json=CHAT, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "X-Request-Timeout"
    assert not link.requests
