"""`/admin`: draining workers, and the use of each key; for admins only."""

from __future__ import annotations

import asyncio

import pytest

from polypath.deployments.routes import build_api
from polypath.tests.http.fakes import Call, FakeLink, Serve, client_of
from polypath.tests.http.keys import ADMIN, CHAT, USER, auth_of, keyed_client

pytestmark = pytest.mark.anyio

READS = ["/admin/workers", "/admin/limits"]
TURNS = ["/admin/workers/one/drain", "/admin/workers/one/undrain"]


@pytest.mark.parametrize(("key", "status"), [(None, 401), ("pp-no", 401), (USER, 403)])
async def test_only_admins_get_in(serve: Serve, key: str | None, status: int) -> None:
    gateway = await serve(FakeLink(worker_id="one"))
    async with keyed_client(gateway, key) as client:
        for path in READS:
            assert (await client.get(path)).status_code == status
        for path in TURNS:
            assert (await client.post(path)).status_code == status
    assert not gateway.all_workers()[0].is_draining


async def test_without_keys_it_is_read_only(serve: Serve) -> None:
    gateway = await serve(FakeLink(worker_id="one"))
    async with client_of(gateway) as client:
        for path in READS:
            assert (await client.get(path)).status_code == 200
        for path in TURNS:
            assert (await client.post(path)).status_code == 403


async def test_a_draining_worker_ends_what_it_has_and_gets_nothing_new(serve: Serve) -> None:
    one = FakeLink("abcdefgh" * 3, worker_id="one", step_s=0.02)
    other = FakeLink(worker_id="other")
    gateway = await serve(one, other)
    auth = auth_of()
    other_worker = next(worker for worker in gateway.all_workers() if worker.id == "other")
    await other_worker.link.hold(True)
    headers = {"Authorization": f"Bearer {USER}"}
    stream = Call(
        build_api(gateway, auth), "POST", "/v1/chat/completions", {**CHAT, "stream": True}, headers
    )
    await stream.until(2)
    async with keyed_client(gateway, ADMIN, auth=auth) as client:
        drained = (await client.post("/admin/workers/one/drain")).json()
        assert (drained["is_draining"], drained["in_flight"]) == (True, 1)
        back = (await client.post("/admin/workers/other/undrain")).json()
        assert back["is_draining"] is False
        for _ in range(3):
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        await asyncio.wait_for(stream.task, 5)
        listed = {item["worker_id"]: item for item in (await client.get(READS[0])).json()["data"]}
    assert stream.text.endswith("data: [DONE]\n\n")
    assert (len(one.requests), len(other.requests)) == (1, 3)
    assert listed["one"] == {
        "worker_id": "one",
        "model": "tiny",
        "is_draining": True,
        "in_flight": 0,
        "running": 0,
        "waiting": 0,
    }


async def test_a_drained_worker_gets_nothing_from_any_gateway(serve: Serve) -> None:
    """Also not from one that comes to know it later."""
    one, other = FakeLink(worker_id="one"), FakeLink(worker_id="other", max_num_seqs=1)
    first, second = await serve(one, other), await serve(one, other)
    async with keyed_client(first, ADMIN) as client:
        await client.post("/admin/workers/one/drain")
    third = await serve(one, other)
    for gateway in (first, second, third):
        async with client_of(gateway) as client:
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
    assert (len(one.requests), len(other.requests)) == (0, 3)
    async with keyed_client(third, ADMIN) as client:
        back = (await client.post("/admin/workers/one/undrain")).json()
    assert back["is_draining"] is False
    assert not any(worker.is_draining for worker in first.all_workers())


async def test_a_worker_that_does_not_answer_cannot_be_drained(serve: Serve) -> None:
    link = FakeLink(worker_id="one")
    gateway = await serve(link)
    link.is_dead = True
    async with keyed_client(gateway, ADMIN) as client:
        answer = await client.post("/admin/workers/one/drain")
    assert answer.status_code == 503, answer.text


async def test_an_unknown_worker_is_a_404_that_lists_them(serve: Serve) -> None:
    async with keyed_client(await serve(FakeLink(worker_id="one")), ADMIN) as client:
        answer = await client.post("/admin/workers/two/drain")
    assert answer.status_code == 404
    assert "there are: one" in answer.json()["error"]["message"]


async def test_the_use_of_each_key_is_shown_without_the_key(serve: Serve) -> None:
    auth = auth_of(requests_per_minute=5, tokens_per_minute=1000)
    gateway = await serve(FakeLink("hello"))
    api = build_api(gateway, auth)
    body = {"model": "tiny", "prompt": [5] * 10, "max_tokens": 80}
    sent = Call(api, "POST", "/v1/completions", body, {"Authorization": f"Bearer {USER}"})
    await asyncio.wait_for(sent.until(2), 5)
    await sent.leave()
    asked = Call(api, "GET", "/admin/limits", headers={"Authorization": f"Bearer {ADMIN}"})
    await asked.until(2)
    assert '"name":"user"' in asked.text
    assert '"requests_per_minute":{"limit":5,"used":1}' in asked.text
    assert '"tokens_per_minute":{"limit":1000,"used":16}' in asked.text
    assert USER not in asked.text
    assert auth.keys[0].hash not in asked.text
    await asked.leave()
