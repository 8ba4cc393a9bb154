"""The gateway's list of workers follows what answers behind the link."""

from __future__ import annotations

import asyncio
from typing import Any

from polypath.deployments.roster import update
from polypath.runtime.errors import EngineError


class FakeLink:
    """Answers as the worker `id`, or not at all when that is None."""

    def __init__(self) -> None:
        self.id: str | None = None

    async def stats(self) -> dict[str, Any]:
        if self.id is None:
            raise EngineError("no worker")
        return {"worker_id": self.id}


class FakeGateway:
    """Remembers who is in."""

    def __init__(self) -> None:
        self.workers: set[str] = set()

    async def add_worker(self, link: FakeLink) -> Any:  # something with an id
        assert link.id is not None
        self.workers.add(link.id)
        return type("Added", (), {"id": link.id})

    def remove_worker(self, worker_id: str) -> None:
        self.workers.discard(worker_id)


def test_a_worker_comes_is_replaced_and_goes() -> None:
    gateway, link = FakeGateway(), FakeLink()

    def look(known: str | None) -> str | None:
        return asyncio.run(update(gateway, link, known))  # type: ignore[arg-type]  # stand-ins

    assert look(None) is None
    link.id = "w1"
    assert look(None) == "w1"
    assert look("w1") == "w1"
    assert gateway.workers == {"w1"}
    link.id = "w2"
    assert look("w1") == "w2"
    assert gateway.workers == {"w2"}
    link.id = None
    assert look("w2") is None
    assert gateway.workers == set()
