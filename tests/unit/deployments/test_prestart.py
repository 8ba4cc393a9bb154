"""Of processes that Ray starts ahead one becomes the controller, and another imports torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from polypath.deployments import prestart

LOADED = """
import gc, sys, threading
import polypath.deployments.prestart
print(gc.isenabled(), threading.active_count(), "pandas" in sys.modules, "torch" in sys.modules)
"""


def loaded(folder: Path | None) -> str:
    """What a new process finds once it has imported the module."""
    environment = {name: value for name, value in os.environ.items() if name != prestart.FOLDER}
    if folder is not None:
        environment |= prestart.environment(folder)
        assert environment["RAY_preload_python_modules"] == "polypath.deployments.prestart"
    command = [sys.executable, "-c", LOADED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_nothing_is_done_where_no_start_of_ours_asks_for_it(tmp_path: Path) -> None:
    assert loaded(None) == "True 1 False False"
    (tmp_path / "worker").touch()  # so that its thread waits for nobody
    assert loaded(tmp_path) == "False 2 True False"


def test_the_first_actor_says_so_and_imports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prestart, "is_actor", lambda: True)
    assert not prestart.import_ahead(tmp_path)
    assert (tmp_path / "controller").exists() and not (tmp_path / "worker").exists()


def test_one_of_the_others_imports_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prestart, "is_actor", lambda: False)
    (tmp_path / "controller").touch()
    assert prestart.import_ahead(tmp_path)
    assert (tmp_path / "worker").read_text() == str(os.getpid())
    assert not prestart.import_ahead(tmp_path)


def test_a_process_that_nobody_needs_stops_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prestart, "is_actor", lambda: False)
    monkeypatch.setattr(prestart, "LIMIT_S", 0.05)
    assert not prestart.import_ahead(tmp_path)
    assert not prestart.import_ahead(tmp_path / "gone")
