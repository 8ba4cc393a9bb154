"""Who may ask for what: keys, roles, models and priorities."""

from __future__ import annotations

import logging

import openai
import pytest

from polypath.deployments.auth_config import AuthConfig, KeyConfig
from polypath.deployments.keys import hash_key, new_key
from polypath.deployments.routes import build_api
from polypath.tests.http.fakes import FakeLink, Serve, app_client, client_of
from polypath.tests.http.keys import ADMIN, CHAT, OTHER, USER, auth_of, keyed_client
from polypath.tests.http.live import live_server

pytestmark = pytest.mark.anyio

FOR_KEYS = ["/", "/v1/models", "/v1/models/tiny", "/openapi.json", "/v1/nowhere", "/admin/nowhere"]
FOR_ADMINS = ["/metrics", "/v1/paths", "/metrics/", "/v1/paths/"]


@pytest.mark.parametrize("path", [*FOR_KEYS, *FOR_ADMINS])
async def test_without_a_key_nothing_is_told(serve: Serve, path: str) -> None:
    async with keyed_client(await serve(FakeLink()), None) as client:
        answer = await client.get(path)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", None)
    assert "didn't provide an API key" in error["message"]


async def test_a_wrong_key_is_refused_as_openai_does_and_not_echoed(serve: Serve) -> None:
    async with keyed_client(await serve(FakeLink()), "pp-wrong-key") as client:
        answer = await client.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert "wrong" not in answer.text


@pytest.mark.parametrize(
    "header",
    [
        f"Basic {USER}",
        USER,
        f"Bearer {USER} {USER}",
        "Bearer",
        "Bearer ",
        f"Bearer {USER[:-1]}",
        f"Bearer {hash_key(USER)}",
        "Bearer \xff",
    ],
)
async def test_what_is_not_exactly_a_key_is_none(serve: Serve, header: str) -> None:
    async with keyed_client(await serve(FakeLink()), None) as client:
        headers = [(b"Authorization", header.encode("latin-1"))]
        assert (await client.get("/v1/models", headers=headers)).status_code == 401


async def test_two_authorization_headers_are_none(serve: Serve) -> None:
    async with keyed_client(await serve(FakeLink()), None) as client:
        headers = [("Authorization", f"Bearer {USER}"), ("Authorization", f"Bearer {USER}")]
        assert (await client.get("/v1/models", headers=headers)).status_code == 401


async def test_health_needs_no_key(serve: Serve) -> None:
    async with keyed_client(await serve(FakeLink()), None) as client:
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("key", [USER, OTHER, ADMIN])
async def test_each_key_gets_answers(serve: Serve, key: str) -> None:
    async with keyed_client(await serve(FakeLink()), key) as client:
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200


@pytest.mark.parametrize("path", FOR_ADMINS)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
async def test_what_tells_of_the_machines_is_for_admins(
    serve: Serve, path: str, method: str
) -> None:
    gateway = await serve(FakeLink())
    async with keyed_client(gateway) as client:
        assert (await client.request(method, path)).status_code == 403
    async with keyed_client(gateway, ADMIN) as client:
        assert (await client.request(method, path)).status_code == (
            405 if method == "POST" else 200
        )


async def test_every_route_but_health_asks_for_a_key(serve: Serve) -> None:
    """Also those that are added after this test was written."""
    api = build_api(await serve(FakeLink()), auth_of())
    paths = {"/openapi.json", *api.openapi()["paths"]}
    assert len(paths) > 8
    async with app_client(api) as client:
        for path in paths - {"/health"}:
            for method in ("GET", "POST"):
                status = (await client.request(method, path)).status_code
                assert status == 401, (method, path)


async def test_without_keys_all_is_open_but_what_changes_the_server(serve: Serve) -> None:
    async with client_of(await serve(FakeLink())) as client:
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/v1/paths")).status_code == 200
        refused = await client.post("/admin/workers/worker-fake/drain")
    assert refused.status_code == 403
    assert "polypath key" in refused.json()["error"]["message"]


async def test_a_key_sees_and_uses_only_its_models(serve: Serve) -> None:
    gateway = await serve(FakeLink())
    other = {**CHAT, "model": "secret"}
    async with keyed_client(gateway, auth=auth_of(models=("another",))) as client:
        assert (await client.get("/v1/models")).json()["data"] == []
        refused = [await client.post("/v1/chat/completions", json=body) for body in (CHAT, other)]
        refused += [await client.post("/v1/completions", json={"prompt": "Hi"})]
        refused += [await client.post("/tokenize", json={"model": "tiny", "prompt": "Hi"})]
        refused += [await client.get("/v1/models/tiny")]
    for answer in refused:
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "model_not_found"


async def test_priority_is_bounded_by_the_key(serve: Serve) -> None:
    link = FakeLink()
    async with keyed_client(await serve(link), auth=auth_of(priority=5)) as client:
        asked = [None, 5, 9, 4, -1]
        statuses: list[int] = []
        for priority in asked:
            body = CHAT if priority is None else {**CHAT, "priority": priority}
            statuses.append((await client.post("/v1/chat/completions", json=body)).status_code)
    assert statuses == [200, 200, 200, 403, 403]
    assert [request.priority for request in link.requests] == [5, 5, 9]


async def test_openais_client_raises_its_own_errors(serve: Serve) -> None:
    api = build_api(await serve(FakeLink()), auth_of(models=("another",)))
    async with live_server(api) as url, openai.DefaultAsyncHttpxClient(trust_env=False) as http:
        for key, kind in (
            ("pp-bad", openai.AuthenticationError),
            (USER, openai.PermissionDeniedError),
        ):
            client = openai.AsyncOpenAI(
                base_url=f"{url}/v1", api_key=key, max_retries=0, http_client=http
            )
            with pytest.raises(kind):
                await client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": "Hi"}]
                )


async def test_no_key_and_no_prompt_is_logged_whatever_goes_wrong(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    link = FakeLink()
    link.raises = KeyError("MARKED-PROMPT")  # a bug of ours that quotes the request
    body = {**CHAT, "messages": [{"role": "user", "content": "MARKED-PROMPT"}]}
    gateway = await serve(link)
    for key in (USER, "pp-MARKED-KEY"):
        async with keyed_client(gateway, key) as client:
            for sent in (body, {**body, "MARKED-PROMPT": 1}, {**body, "n": "MARKED-PROMPT"}):
                await client.post("/v1/chat/completions", json=sent)
    assert "fault of ours" in caplog.text
    for secret in ("MARKED", USER):
        assert secret not in caplog.text


async def test_a_made_key_opens_what_its_hash_is_configured_for(serve: Serve) -> None:
    key = new_key()
    auth = AuthConfig(keys=(KeyConfig(name="made", hash=hash_key(key)),))
    async with keyed_client(await serve(FakeLink()), key, auth=auth) as client:
        assert (await client.get("/v1/models")).status_code == 200
