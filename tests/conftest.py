"""Fixtures that tests of more than one folder use."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The GGUF of SmolLM2-135M-Instruct that `make dev` installs."""
    from polypath.runtime.checkpoint.source import default_model

    return Path(default_model())
