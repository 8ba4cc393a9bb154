"""A worker over a tiny model, for all tests of links."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from polypath.actors.worker import Worker
from polypath.tests.http.live import start_worker


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def worker(random_llama: Path) -> Iterator[Worker]:
    """Two run and two wait; 512 positions."""
    worker = start_worker(random_llama, max_num_seqs=2, max_waiting=2)
    yield worker
    worker.stop()
