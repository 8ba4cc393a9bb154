"""Unit tests work on small tensors, where a second thread costs more than it brings."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """Keeps torch on one thread, in tests whose modules have imported it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def random_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama with random weights and 512 positions."""
    from polypath.tests import tiny_models

    folder = tmp_path_factory.mktemp("random-llama")
    tiny_models.random(folder)
    return folder
