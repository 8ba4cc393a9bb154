"""Unit tests work on small tensors, where a second thread costs more than it brings."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """Keeps torch on one thread, in tests whose modules have imported it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
