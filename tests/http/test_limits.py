"""Rates and concurrency of keys, on one gateway and over two together."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest

from polypath.deployments.ledger import Ledger
from polypath.deployments.ledger_link import LocalLedger
from polypath.deployments.routes import build_api
from polypath.tests.http.fakes import Call, FakeLink, Serve, app_client
from polypath.tests.http.keys import ADMIN, CHAT, OTHER, USER, auth_of, keyed_client

pytestmark = pytest.mark.anyio

CHATS = "/v1/chat/completions"


def remaining(answer: httpx.Response, name: str) -> int:
    return int(answer.headers[f"x-ratelimit-remaining-{name}"])


async def test_requests_beyond_the_rate_get_openais_429(serve: Serve) -> None:
    gateway = await serve(FakeLink())
    async with keyed_client(gateway, auth=auth_of(requests_per_minute=2)) as client:
        answers = [await client.post(CHATS, json=CHAT) for _ in range(3)]
        free = await client.get("/v1/models")  # what only reads a list does not count
        others = await client.post(CHATS, json=CHAT, headers={"Authorization": f"Bearer {OTHER}"})
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert [remaining(answer, "requests") for answer in answers] == [1, 0, 0]
    assert {answer.headers["x-ratelimit-limit-requests"] for answer in answers} == {"2"}
    assert "x-ratelimit-limit-tokens" not in answers[0].headers
    error = answers[2].json()["error"]
    assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
    assert "Limit 2, Used 2, Requested 1. Please try again in " in error["message"]
    assert 1 <= int(answers[2].headers["retry-after"]) <= 61
    assert free.status_code == others.status_code == 200


async def test_tokens_are_reserved_by_max_tokens_and_settled_by_use(serve: Serve) -> None:
    gateway = await serve(FakeLink("hello"))  # six tokens with the end
    body = {"model": "tiny", "prompt": [5] * 10, "max_tokens": 80}
    async with keyed_client(gateway, auth=auth_of(tokens_per_minute=100)) as client:
        answers = [await client.post("/v1/completions", json=body) for _ in range(2)]
    assert answers[0].status_code == 200
    assert answers[0].json()["usage"]["total_tokens"] == 16
    assert remaining(answers[0], "tokens") == 10
    # 16 are spent, so 90 more do not fit.
    assert answers[1].status_code == 429
    error = answers[1].json()["error"]
    assert (error["type"], error["code"]) == ("tokens", "rate_limit_exceeded")
    assert "Limit 100, Used 16, Requested 90." in error["message"]
    assert remaining(answers[1], "tokens") == 84


async def test_a_request_without_max_tokens_holds_at_most_the_limit(serve: Serve) -> None:
    gateway = await serve(FakeLink("hello"))
    body = {"model": "tiny", "prompt": [5] * 10}
    async with keyed_client(gateway, auth=auth_of(tokens_per_minute=40)) as client:
        first = await client.post("/v1/completions", json=body)
        too_large = await client.post("/v1/completions", json={**body, "max_tokens": 31})
    assert first.status_code == 200
    assert too_large.status_code == 429
    assert "Request too large" in too_large.json()["error"]["message"]
    assert "retry-after" not in too_large.headers  # waiting would not help


async def test_a_prompt_counts_once_however_many_answers(serve: Serve) -> None:
    gateway = await serve(FakeLink("hello"))
    body = {"model": "tiny", "prompt": [5] * 10, "max_tokens": 20, "n": 3}
    async with keyed_client(gateway, auth=auth_of(tokens_per_minute=1000)) as client:
        first = await client.post("/v1/completions", json=body)
        second = await client.post("/v1/completions", json={**body, "max_tokens": 1, "n": 1})
    assert remaining(first, "tokens") == 1000 - 10 - 3 * 20
    assert remaining(second, "tokens") == 1000 - (10 + 3 * 6) - 11


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_place_is_free_again_when_the_answer_ends_or_the_client_leaves(
    serve: Serve, leaves: bool
) -> None:
    link = FakeLink("abcdefgh" * 4, step_s=0.01)
    gateway = await serve(link)
    auth = auth_of(max_concurrent=1)
    api = build_api(gateway, auth)
    headers = {"Authorization": f"Bearer {USER}"}
    stream = Call(api, "POST", CHATS, {**CHAT, "stream": True}, headers)
    await stream.until(2)
    second = Call(api, "POST", CHATS, CHAT, headers)
    await second.until(2)
    assert second.messages[0]["status"] == 429
    assert "concurrent_requests" in second.text
    if leaves:
        await stream.leave()
    else:
        await asyncio.wait_for(stream.task, 5)
    third = Call(api, "POST", CHATS, CHAT, headers)
    await third.until(2)
    assert third.messages[0]["status"] == 200
    await third.leave()
    assert not link.running


async def test_a_refused_body_gives_its_place_back(serve: Serve) -> None:
    gateway = await serve(FakeLink())
    auth = auth_of(max_concurrent=1, tokens_per_minute=1000)
    async with keyed_client(gateway, auth=auth) as client:
        bad = [{"model": "tiny"}, {**CHAT, "n": "x"}, {**CHAT, "max_tokens": 10**6}]
        statuses = [(await client.post(CHATS, json=body)).status_code for body in [*bad, CHAT]]
    assert statuses == [400, 400, 400, 200]


@pytest.mark.parametrize(
    ("limits", "allowed"),
    [({"requests_per_minute": 7}, 7), ({"max_concurrent": 3}, 3), ({"tokens_per_minute": 100}, 6)],
)
async def test_two_gateways_share_one_limit(
    serve: Serve, limits: dict[str, int], allowed: int
) -> None:
    """Exactly, when both ask one ledger: 20 requests at once, ten to each."""
    ledger, auth = Ledger(), auth_of(**limits)
    body = {"model": "tiny", "prompt": [5] * 6, "max_tokens": 10}
    clients: list[httpx.AsyncClient] = []
    for _ in range(2):
        gateway = await serve(FakeLink("hello" * 10, first_step_s=0.3))
        shared = LocalLedger(gateway.id, ledger)
        clients.append(keyed_client(gateway, auth=auth, ledger=shared))
    async with clients[0], clients[1]:
        asked = [client.post("/v1/completions", json=body) for client in clients * 10]
        answers = await asyncio.gather(*asked)
    statuses = [answer.status_code for answer in answers]
    assert statuses.count(200) == allowed
    assert statuses.count(429) == 20 - allowed


async def test_the_wall_clock_may_jump(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = await serve(FakeLink())
    now_s = time.time()
    async with keyed_client(gateway, auth=auth_of(requests_per_minute=2)) as client:
        statuses: list[int] = []
        for jump_s in (0, -3600, 3600):
            monkeypatch.setattr(time, "time", lambda jump_s=jump_s: now_s + jump_s)
            answer = await client.post(CHATS, json=CHAT)
            statuses.append(answer.status_code)
    assert statuses == [200, 200, 429]
    assert 1 <= int(answer.headers["retry-after"]) <= 61


async def test_metrics_count_requests_and_tokens_by_the_name_of_the_key(serve: Serve) -> None:
    auth = auth_of(requests_per_minute=2)
    api = build_api(await serve(FakeLink("hello")), auth)
    async with app_client(api) as client:
        for key, times in [(USER, 3), (OTHER, 1), ("pp-wrong", 1)]:
            headers = {"Authorization": f"Bearer {key}"}
            for _ in range(times):
                body = {"model": "tiny", "prompt": [5] * 10, "max_tokens": 80}
                await client.post("/v1/completions", json=body, headers=headers)
        answer = await client.get("/metrics", headers={"Authorization": f"Bearer {ADMIN}"})
    found = {
        line.partition("gateway=")[2].partition(",")[2]: line.rpartition(" ")[2]
        for line in answer.text.splitlines()
        if line.startswith(("polypath_gateway_key_requests_total", "polypath_gateway_key_tokens_t"))
    }
    assert found == {
        'key="user",outcome="admitted"} 2.0': "2.0",
        'key="user",outcome="requests"} 1.0': "1.0",
        'key="other",outcome="admitted"} 1.0': "1.0",
        'key="user",kind="prompt"} 20.0': "20.0",
        'key="user",kind="generated"} 12.0': "12.0",
        'key="other",kind="prompt"} 10.0': "10.0",
        'key="other",kind="generated"} 6.0': "6.0",
    }
    assert not any(secret in answer.text for secret in (USER, OTHER, auth.keys[0].hash))
