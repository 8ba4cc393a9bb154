"""A gateway over fake workers and the tiny byte tokenizer, in process: no Ray, no engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from polypath.deployments.api_settings import ApiSettings
from polypath.deployments.gateway import Gateway
from polypath.runtime.checkpoint.source import Checkpoint, open_checkpoint
from polypath.tests.http.fakes import FakeLink, Serve
from polypath.tests.tiny_models import random


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("tiny")
    random(folder)
    return open_checkpoint(str(folder))


@pytest.fixture
async def serve(tiny: Checkpoint) -> AsyncIterator[Serve]:
    """`await serve(link, ..., settings=...)`: a gateway for the model `tiny` with these workers."""
    gateways: list[Gateway] = []

    async def serve(*links: FakeLink, settings: ApiSettings | None = None) -> Gateway:
        gateway = Gateway(settings or ApiSettings(stranded_s=0.0))
        gateways.append(gateway)
        gateway.add_checkpoint(tiny, name="tiny")
        for link in links:
            await gateway.add_worker(link)
        return gateway

    yield serve
    for gateway in gateways:
        gateway.close()
