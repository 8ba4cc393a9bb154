"""Texts far too long, or without a blank: answered soon, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from polypath.deployments.gateway import Gateway
from polypath.runtime.checkpoint.source import open_checkpoint
from polypath.tests.http.fakes import FakeLink, client_of

pytestmark = pytest.mark.anyio

MEGABYTE = 1_000_000
RUNS = {
    "letter": "a" * MEGABYTE,
    "equals": "=" * MEGABYTE,
    "blanks": " " * MEGABYTE,
    "newlines": "\n" * MEGABYTE,
    "digits": "7" * MEGABYTE,
    "base64": "QWxhZGRpbjpvcGVu" * (MEGABYTE // 16),
    "chinese": "漢字" * (MEGABYTE // 6),
    "combining": "a" + "\u0301" * (MEGABYTE // 2),
}


@pytest.fixture(scope="module")
def gateway(default_model_path: Path) -> Iterator[Gateway]:
    gateway = Gateway()
    gateway.add_checkpoint(open_checkpoint(str(default_model_path)), name="tiny")
    asyncio.run(gateway.add_worker(FakeLink(max_model_len=8192)))
    yield gateway
    gateway.close()


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_a_text_that_cannot_fit_is_refused_before_tokenizing(
    gateway: Gateway, path: str, kind: str
) -> None:
    text = RUNS[kind]
    body = (
        {"prompt": text}
        if "chat" not in path
        else {"messages": [{"role": "user", "content": text}]}
    )
    start = time.monotonic()
    async with client_of(gateway) as client:
        response = await client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert time.monotonic() - start < 2


async def test_tokenizing_holds_nobody_else_up(gateway: Gateway) -> None:
    longest_gap_s = 0.0

    async def poll() -> None:
        nonlocal longest_gap_s
        async with client_of(gateway) as client:
            while True:
                start = time.monotonic()
                assert (await client.get("/health")).status_code == 200
                await asyncio.sleep(0.01)
                longest_gap_s = max(longest_gap_s, time.monotonic() - start)

    polling = asyncio.create_task(poll())
    await asyncio.sleep(0.05)
    async with client_of(gateway) as client:
        responses = await asyncio.gather(
            client.post("/v1/completions", json={"prompt": "7" * 600_000}),
            client.post("/v1/completions", json={"prompt": "a" * 600_000}),
        )
    polling.cancel()
    assert [response.status_code for response in responses] == [400, 400]
    assert longest_gap_s < 0.5
