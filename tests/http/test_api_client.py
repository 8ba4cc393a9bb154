"""The commands' own client: sends its key, trusts what it is told to trust."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
import uvicorn

from polypath.deployments.api_client import ApiClient, ApiClientError
from polypath.deployments.routes import build_api
from polypath.tests.certificates import self_signed
from polypath.tests.http.fakes import FakeLink, Serve
from polypath.tests.http.keys import ADMIN, USER, auth_of
from polypath.tests.http.live import live_server

pytestmark = pytest.mark.anyio


def models(url: str) -> list[str]:
    with ApiClient(url) as client:
        return client.models()


async def test_the_key_comes_from_the_environment(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with live_server(build_api(await serve(FakeLink()), auth_of())) as url:
        monkeypatch.delenv("POLYPATH_API_KEY", raising=False)
        with pytest.raises(ApiClientError, match="didn't provide an API key"):
            await asyncio.to_thread(models, url)
        monkeypatch.setenv("POLYPATH_API_KEY", USER)
        assert await asyncio.to_thread(models, url) == ["tiny"]
        with ApiClient(url, ADMIN) as client:
            assert await asyncio.to_thread(client.get, "/v1/paths")


async def test_a_certificate_is_trusted_when_it_is_named(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = self_signed(tmp_path)
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        build_api(await serve(FakeLink())),
        log_level="warning",
        lifespan="off",
        ws="none",
        ssl_certfile=str(cert),
        ssl_keyfile=str(key),
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    url = f"https://127.0.0.1:{listening.getsockname()[1]}"
    with pytest.raises(ApiClientError, match=r"is not trusted .* SSL_CERT_FILE"):
        await asyncio.to_thread(models, url)
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    assert await asyncio.to_thread(models, url) == ["tiny"]
    server.should_exit = True
    await serving
    listening.close()
