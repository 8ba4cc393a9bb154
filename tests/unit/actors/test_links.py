"""The same checks over every kind of link that needs no Ray."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from polypath.actors.link import LocalLink, WorkerLink
from polypath.actors.road_link import RoadLink
from polypath.actors.road_server import RoadServer
from polypath.actors.worker import Worker
from polypath.tests.link_checks import CHECKS, Check, name_of

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def road(worker: Worker, kind: str) -> AsyncIterator[RoadLink]:
    """A link over a socket; `kind` is `unix` or `tcp`."""
    server = RoadServer(worker)
    address = await server.start("127.0.0.1" if kind == "tcp" else None)
    try:
        link = await RoadLink.connect(
            replace(address, local=None) if kind == "tcp" else address, "gateway-test"
        )
        yield link
        link.close()
    finally:
        await server.close()


@pytest.fixture(params=["local", "unix", "tcp"])
async def link(request: pytest.FixtureRequest, worker: Worker) -> AsyncIterator[WorkerLink]:
    if request.param == "local":
        yield LocalLink(worker)
        return
    async with road(worker, request.param) as link:
        yield link


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
async def test_every_link_does_it(link: WorkerLink, check: Check) -> None:
    await check(link)
