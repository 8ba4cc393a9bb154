"""One live application for all tests here that do not need to break or restart it."""

from __future__ import annotations

from collections.abc import Iterator
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


@pytest.fixture(scope="session")
def server(tiny_model: Path) -> Iterator[RunningServer]:
    """`polypath serve` with the tiny model, four at once and four waiting."""
    limits = ["--max-num-seqs", "4", "--max-waiting", "4"]
    with serving([str(tiny_model), "--port", "0", *limits]) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[OpenAI]:
    """The official client, which must not paper over errors by retrying."""
    http = DefaultHttpxClient(trust_env=False)
    with OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http
    ) as openai:
        yield openai
