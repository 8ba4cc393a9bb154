"""What is not about models: methods, unknown paths, request ids, cross-origin, slashes, clocks."""

from __future__ import annotations

import re
import time

import pytest

from polypath.deployments.api_settings import ApiSettings
from polypath.deployments.edge import clean_request_id
from polypath.tests.http.fakes import FakeLink, Serve, client_of

pytestmark = pytest.mark.anyio

READABLE = ["/", "/v1/models", "/v1/models/tiny", "/health", "/v1/paths", "/metrics"]


@pytest.mark.parametrize("path", READABLE)
async def test_head_is_get_without_the_body(serve: Serve, path: str) -> None:
    gateway = await serve(FakeLink())
    async with client_of(gateway) as client:
        got, head = await client.get(path), await client.head(path)
    assert (got.status_code, head.status_code) == (200, 200)
    assert got.content
    assert not head.content
    assert head.headers["content-type"] == got.headers["content-type"]


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("PUT", "/v1/chat/completions", {"POST"}),
        ("GET", "/v1/completions", {"POST"}),
        ("OPTIONS", "/v1/chat/completions", {"POST"}),
        ("POST", "/v1/models", {"GET", "HEAD"}),
        ("DELETE", "/health", {"GET", "HEAD"}),
    ],
)
async def test_a_wrong_method_is_a_405_that_says_which_is_right(
    serve: Serve, method: str, path: str, allow: set[str]
) -> None:
    gateway = await serve(FakeLink())
    async with client_of(gateway) as client:
        response = await client.request(method, path)
    assert response.status_code == 405
    assert set(response.headers["allow"].split(", ")) == allow
    assert path in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/banana", "/v2/models", "/v1", "/v1/chat"])
async def test_an_unknown_path_is_a_404_in_openais_shape(serve: Serve, path: str) -> None:
    gateway = await serve(FakeLink())
    async with client_of(gateway) as client:
        response = await client.get(path)
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "not_found_error"


async def test_a_trailing_slash_changes_nothing(serve: Serve) -> None:
    gateway = await serve(FakeLink())
    async with client_of(gateway) as client:
        assert (await client.get("/v1/models/")).json() == (await client.get("/v1/models")).json()
        response = await client.post("/v1/completions/", json={"prompt": "x"})
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ("abc-123", "abc-123"),
        ("a b\tc%0d%0aINFO forged", "abc0d0aINFOforged"),
        ("x" * 10_000, "x" * 128),
        ("", None),
        ("\u00e9\u00e9", None),
    ],
)
def test_a_request_id_is_cleaned_or_replaced(sent: str, expected: str | None) -> None:
    cleaned = clean_request_id(sent)
    if expected is None:
        assert re.fullmatch(r"req-[0-9a-f]{24}", cleaned)
    else:
        assert cleaned == expected


async def test_every_answer_has_a_request_id(serve: Serve) -> None:
    gateway = await serve(FakeLink())
    async with client_of(gateway) as client:
        for path in ("/v1/models", "/v1/banana"):
            assert (await client.get(path)).headers["x-request-id"].startswith("req-")
            sent = {"x-request-id": "mine"}
            assert (await client.get(path, headers=sent)).headers["x-request-id"] == "mine"


async def test_cross_origin_is_off_by_default(serve: Serve) -> None:
    gateway = await serve(FakeLink())
    async with client_of(gateway) as client:
        response = await client.get("/v1/models", headers={"origin": "http://evil.example"})
    assert "access-control-allow-origin" not in response.headers


async def test_cross_origin_covers_streams_and_errors_when_configured(serve: Serve) -> None:
    link = FakeLink()
    gateway = await serve(link, settings=ApiSettings(cors_origins=("http://app.example",)))
    origin = {"origin": "http://app.example"}
    async with client_of(gateway) as client:
        asked = origin | {"access-control-request-method": "POST"}
        answers = [
            await client.options("/v1/chat/completions", headers=asked),
            await client.post(
                "/v1/completions", json={"prompt": "x", "stream": True}, headers=origin
            ),
            await client.post("/v1/completions", json={"prompt": 5}, headers=origin),
            await client.get("/v1/banana", headers=origin),
        ]
        link.raises = ZeroDivisionError()
        answers.append(await client.post("/v1/completions", json={"prompt": "x"}, headers=origin))
    assert [answer.status_code for answer in answers] == [200, 200, 400, 404, 500]
    for answer in answers:
        assert answer.headers["access-control-allow-origin"] == "http://app.example"


@pytest.mark.parametrize("jump_s", [3600, -3600])
async def test_a_jump_of_the_wall_clock_moves_only_created(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    gateway = await serve(FakeLink("hello", step_s=0.001))
    real = time.time
    start = real()
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    async with client_of(gateway) as client:
        answer = (await client.post("/v1/completions", json={"prompt": "x"})).json()
        metrics = (await client.get("/metrics")).text
    assert abs(answer["created"] - start - jump_s) < 60
    sums = [float(line.split()[-1]) for line in metrics.splitlines() if "_seconds_sum" in line]
    assert sums
    assert all(0 <= value < 60 for value in sums)


async def test_no_prompt_and_no_answer_stands_in_the_log_or_the_metrics(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    link = FakeLink("answermarker")
    gateway = await serve(link)
    bodies = [
        {"prompt": "promptmarker"},
        {"prompt": "promptmarker", "stream": True},
        {"prompt": "promptmarker", "stop": ""},
        {"prompt": "promptmarker" * 100},
        {"promptmarker": 1},
    ]
    async with client_of(gateway) as client:
        for body in bodies:
            await client.post("/v1/completions", json=body)
        await client.post("/v1/completions", content=b'{"promptmarker')
        link.raises = KeyError("promptmarker")
        await client.post("/v1/completions", json=bodies[0])
        metrics = (await client.get("/metrics")).text
    for text in (caplog.text, metrics):
        assert "promptmarker" not in text
        assert "answermarker" not in text
