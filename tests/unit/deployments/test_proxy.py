"""Headers are cleaned and limited before Ray Serve's proxy reads them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import httpx
import pytest
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse

from polypath.deployments.config import RAY_ENVIRONMENT
from polypath.deployments.proxy import MAX_HEADER_BYTES, CleanHeaders

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def headers_seen(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that answers with the headers it got."""
    await JSONResponse(Request(scope).headers.items())(scope, receive, send)


async def ask(headers: list[tuple[bytes, bytes]]) -> httpx.Response:
    transport = httpx.ASGITransport(app=CleanHeaders(headers_seen))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.get("/", headers=headers)


async def names_and_values(headers: list[tuple[bytes, bytes]]) -> list[list[str]]:
    return (await ask(headers)).json()


def test_serve_finds_what_its_proxy_calls() -> None:
    path = RAY_ENVIRONMENT["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"]
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)()
    assert [type(entry) for entry in found] == [Middleware]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ([b"mine"], "mine"),
        ([b"a%0d%0aINFO forged"], "a0d0aINFOforged"),
        ([b"x" * 10_000], "x" * 128),
        ([b"\xff\xfe1"], "1"),  # no UTF-8, which Serve's proxy would fail on
        ([b"first", b"second"], "first"),
    ],
)
async def test_serve_gets_one_clean_request_id(sent: list[bytes], expected: str) -> None:
    seen = await names_and_values([(b"X-Request-Id", value) for value in sent])
    assert [value for name, value in seen if name == "x-request-id"] == [expected]


async def test_a_request_without_an_id_gets_one() -> None:
    ids = [dict(await names_and_values(sent))["x-request-id"] for sent in ([], [(b"a", b"b")])]
    assert len(set(ids)) == 2
    assert all(value.startswith("req-") for value in ids)


@pytest.mark.parametrize(
    "name",
    [
        b"X-Request-Disconnect-Disabled",
        b"x_request_timeout_seconds",
        b"serve_multiplexed_model_id",
        b"Serve-Multiplexed-Model-Id",
        b"x-session-id",
    ],
)
async def test_clients_cannot_command_serve(name: bytes) -> None:
    seen = dict(await names_and_values([(name, b"\xff"), (b"x-other", b"kept")]))
    assert name.decode().lower() not in seen
    assert seen["x-other"] == "kept"


@pytest.mark.parametrize("count", [1, 1000])
async def test_too_many_bytes_of_headers_are_a_431(count: int) -> None:
    value = b"v" * (MAX_HEADER_BYTES // count)
    response = await ask([(b"x-%d" % i, value) for i in range(count)])
    assert response.status_code == 431
    assert str(MAX_HEADER_BYTES) in response.json()["error"]["message"]
    assert response.headers["x-request-id"].startswith("req-")
    assert response.headers["connection"] == "close"


async def test_long_headers_within_the_limit_pass() -> None:
    assert (await ask([(b"cookie", b"v" * (MAX_HEADER_BYTES - 1000))])).status_code == 200
