"""One live application for all tests here that do not need to break or restart it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from openai import DefaultHttpxClient, OpenAI

from polypath.tests.ray.running_server import RunningServer, serving
from polypath.tests.tiny_models import random

CONTEXT = 8192  # tokens: long enough for streams that tests interrupt


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers, with a chat template."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    random(folder, config={"max_position_embeddings": CONTEXT})
    return folder


class SharedServer:
    """`polypath serve` with the tiny model, four at once and four waiting; started when needed."""

    def __init__(self, model: Path) -> None:
        self._arguments = [str(model), "--port", "0", "--max-num-seqs", "4", "--max-waiting", "4"]
        self._stack = ExitStack()
        self._running: RunningServer | None = None

    def running(self) -> RunningServer:
        if self._running is None:
            self._running = self._stack.enter_context(serving(self._arguments))
        return self._running

    def stop(self) -> None:
        """Make room for a test that starts another: two at once are too much for two cores."""
        self._running = None
        self._stack.close()


@pytest.fixture(scope="session")
def shared(tiny_model: Path) -> Iterator[SharedServer]:
    """What `server` and `no_server` take and stop."""
    found = SharedServer(tiny_model)
    yield found
    found.stop()


@pytest.fixture
def server(shared: SharedServer) -> RunningServer:
    """The shared application, running."""
    return shared.running()


@pytest.fixture(scope="module")
def no_server(shared: SharedServer) -> None:
    """The shared application stopped, for modules that start their own."""
    shared.stop()


@pytest.fixture
def client(server: RunningServer) -> Iterator[OpenAI]:
    """The official client, which must not paper over errors by retrying."""
    http = DefaultHttpxClient(trust_env=False)
    with OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http
    ) as openai:
        yield openai
