"""Fixtures that tests of more than one folder use."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest


def pytest_configure() -> None:
    """Hear Ctrl-C. A shell's background jobs ignore it, as all do that they start: servers under
    test that were to end by it would run on.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The GGUF of SmolLM2-135M-Instruct that `make dev` installs."""
    from polypath.runtime.checkpoint.source import default_model

    return Path(default_model())
