"""Python's garbage collector while an engine is made."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from polypath.runtime import startup
from polypath.runtime.collector import paused
from polypath.runtime.config import EngineConfig
from polypath.runtime.engine import Engine


@pytest.fixture(autouse=True)
def collector_as_before() -> Iterator[None]:
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


def test_it_is_stopped_inside_and_runs_again_after_an_error() -> None:
    gc.enable()
    with pytest.raises(RuntimeError), paused():
        assert not gc.isenabled()
        raise RuntimeError
    assert gc.isenabled()


def test_who_had_stopped_it_finds_it_stopped() -> None:
    gc.disable()
    with paused():
        pass
    assert not gc.isenabled()


def test_a_pause_that_ends_leaves_another_threads_pause_alone() -> None:
    """A process's own pause ended 8 s after its start, amid a capture that needed one."""
    gc.enable()
    first = ExitStack()
    first.enter_context(paused())
    with paused():
        thread = threading.Thread(target=first.close)
        thread.start()
        thread.join()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_engine_is_made_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full collection amid the start took 0.15 s."""
    seen: list[bool] = []

    def start(*args: object, **kwargs: object) -> None:
        seen.append(gc.isenabled())
        raise MemoryError

    gc.enable()
    monkeypatch.setattr(startup, "start", start)
    with pytest.raises(MemoryError):
        Engine.build(EngineConfig(model="not read"))
    assert seen == [False]
    assert gc.isenabled()


def test_importing_the_engine_imports_torch_without_it() -> None:
    """Looking through torch's objects took a fifth of its import."""
    program = """
import gc, sys
seen = {}
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "torch._refs"):
            seen[name] = gc.isenabled()
sys.meta_path.insert(0, Watch())
import polypath.runtime.engine
assert seen == {"torch": False, "torch._refs": False}, seen
assert gc.isenabled()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
