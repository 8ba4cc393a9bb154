"""Bodies that are no JSON, too large or endless: one soon answer, whatever is in them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import httpx
import pytest

from polypath.deployments import json_body
from polypath.deployments.api_settings import ApiSettings
from polypath.tests.http.fakes import FakeLink, Serve, check_error, client_of

pytestmark = pytest.mark.anyio


def _names(count: int) -> bytes:
    return b",".join(b'"f%d":1' % number for number in range(count))


@pytest.mark.parametrize(
    ("raw", "piece"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "a list"),
        (b'"hi"', "a string"),
        (b"null", "null"),
        (b'{"prompt": "a", "temperature": NaN}', "not valid JSON"),
        (b'{"prompt": "a", "temperature": Infinity}', "not valid JSON"),
        (b'{"prompt": "\\ud800", "seed": 1e400}', "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b'{"prompt": "a", "seed": ' + b"1" * 100_000 + b"}", "not valid JSON"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nests"),
    ],
)
async def test_what_is_no_json_object_is_a_400(serve: Serve, raw: bytes, piece: str) -> None:
    gateway = await serve(FakeLink())
    async with client_of(gateway) as client:
        headers = {"content-type": "application/json"}
        response = await client.post("/v1/completions", content=raw, headers=headers)
    check_error(response, 400, None, piece)


async def test_a_body_that_does_not_come_is_a_408(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_body, "BODY_S", 0.2)
    gateway = await serve(FakeLink())

    async def dripping() -> AsyncIterator[bytes]:
        yield b'{"prompt": '
        await asyncio.sleep(60)

    async with client_of(gateway) as client:
        headers = {"content-type": "application/json"}
        response = await client.post("/v1/completions", content=dripping(), headers=headers)
    check_error(response, 408, None, "11 bytes came within 0.2 s")
    assert response.headers["connection"] == "close" and json_body.READING.num_bytes == 0


async def test_bodies_that_come_slowly_together_have_a_limit(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_body, "READING_BYTES", 1000)
    gateway, goes_on = await serve(FakeLink()), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b'{"prompt": "a"' + 386 * b" "
        await goes_on.wait()
        yield b"}"

    async with client_of(gateway) as client:
        headers = {"content-type": "application/json"}

        async def post() -> httpx.Response:
            return await client.post("/v1/completions", content=slow(), headers=headers)

        first = [asyncio.create_task(post()) for _ in range(2)]
        await asyncio.sleep(0.05)
        full = await post()
        check_error(full, 429, None, "Bodies that other clients are sending fill 1000 bytes")
        assert full.headers["retry-after"] == "1"
        goes_on.set()
        assert [(await each).status_code for each in first] == [200, 200]
        assert (await post()).status_code == 200
    assert json_body.READING.num_bytes == 0


@pytest.mark.parametrize(
    ("field", "param"),
    [
        (b'"logit_bias": {"5": 1e400}', "logit_bias"),
        (b'"temperature": 1e400', "temperature"),
        (b'"seed": -1e400', "seed"),
        (b'"prompt": [1e400]', "prompt[0]"),
        (b'"prompt": [[5, 1e30]]', "prompt[0][1]"),
    ],
)
async def test_a_number_beyond_a_double_is_refused_by_its_field(
    serve: Serve, field: bytes, param: str
) -> None:
    gateway = await serve(FakeLink())
    async with client_of(gateway) as client:
        raw = b'{"prompt": "a", ' + field + b"}"
        response = await client.post("/v1/completions", content=raw)
    check_error(response, 400, param, param)


MILLION = 1_000_000


@pytest.mark.parametrize(
    ("path", "raw", "param"),
    [
        ("/v1/completions", b'{"prompt": [' + b"5," * MILLION + b"5]}", "prompt"),
        ("/v1/completions", b'{"prompt": [' + b'"",' * MILLION + b'""]}', "prompt"),
        ("/v1/completions", b'{"prompt": "a", "stop": [' + b"5," * MILLION + b"5]}", "stop"),
        ("/v1/chat/completions", b'{"messages": [' + b"5," * MILLION + b"5]}", "messages[0]"),
        ("/detokenize", b'{"tokens": [' + b'"",' * MILLION + b'""]}', "tokens[0]"),
        ("/v1/completions", b'{"stream_options": {' + _names(300_000) + b"}}", "stream_options.f0"),
        ("/v1/completions", b"{" + _names(300_000) + b"}", "f0"),
    ],
    ids=["ids", "prompts", "stops", "messages", "tokens", "options", "fields"],
)
async def test_a_million_wrong_items_are_one_soon_refusal(
    serve: Serve, path: str, raw: bytes, param: str
) -> None:
    gateway = await serve(FakeLink(), settings=ApiSettings(max_body_bytes=2**23))
    start = time.monotonic()
    async with client_of(gateway) as client:
        response = await client.post(path, content=raw)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert time.monotonic() - start < 2


async def test_another_content_type_is_a_415_that_says_what_to_send(serve: Serve) -> None:
    gateway = await serve(FakeLink())
    async with client_of(gateway) as client:
        response = await client.post("/v1/completions", data={"prompt": "hi"})
    check_error(response, 415, None, "Content-Type: application/json")


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_over_the_limit_is_a_413(serve: Serve, is_chunked: bool) -> None:
    gateway = await serve(FakeLink(), settings=ApiSettings(max_body_bytes=1000))
    raw = b'{"prompt": "' + b"x" * 1000 + b'"}'

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(raw), 100):
            yield raw[start : start + 100]

    content = pieces() if is_chunked else raw
    async with client_of(gateway) as client:
        headers = {"content-type": "application/json"}
        response = await client.post("/v1/completions", content=content, headers=headers)
    check_error(response, 413, None, "1000 bytes")
    assert response.headers["connection"] == "close"


async def test_a_body_in_one_byte_pieces_is_as_good(serve: Serve) -> None:
    gateway = await serve(FakeLink("ok"))

    async def pieces() -> AsyncIterator[bytes]:
        for byte in b'{"prompt": "hi"}':
            yield bytes([byte])

    async with client_of(gateway) as client:
        response = await client.post("/v1/completions", content=pieces())
    assert response.json()["choices"][0]["text"] == "ok"
