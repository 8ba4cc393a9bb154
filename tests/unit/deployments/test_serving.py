"""One `polypath serve` whose start fails in a way that nobody expected."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from polypath.deployments import serving
from polypath.deployments.config import ServeConfig
from polypath.deployments.fleet import plain_fleet
from polypath.deployments.ray_local import LocalRay
from polypath.deployments.serve_preparation import ServeRequest
from polypath.deployments.serve_view import ServeView
from polypath.deployments.serving import Session
from polypath.runtime.config import EngineConfig
from polypath.runtime.errors import EngineError

if TYPE_CHECKING:
    from polypath.deployments.deploy import Deployment

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Serve's, on import


@pytest.fixture(autouse=True)
def no_chatter_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """That file is never closed, which the collector would report in whatever test runs then."""
    monkeypatch.setattr(serving, "_chatter_to", lambda _: nullcontext())


class BrokenRay:
    """Its start raises what Ray raises, or waits while something else goes wrong."""

    name, is_ours, logs = "a broken Ray", True, None

    def __init__(self, chatter: Path, *, hangs: bool) -> None:
        self.chatter = chatter
        self._hangs = hangs
        self.is_killed = threading.Event()

    def start(self) -> None:
        if self._hangs:
            self.is_killed.wait(30)
        raise Exception("the node timed out")

    def watch(self) -> None: ...

    def stop(self, *, keep_logs: bool = False) -> None: ...

    def kill(self) -> None:
        self.is_killed.set()


def session(ray: BrokenRay) -> Session:
    request = ServeRequest(fleet=plain_fleet(EngineConfig(model="")), where=ServeConfig())
    return Session(request, cast(LocalRay, ray), ServeView())


def test_a_fault_nobody_expected_is_shown_and_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert session(BrokenRay(tmp_path / "log", hangs=False)).run("127.0.0.1", 1) == 1
    told = capsys.readouterr().err
    assert "a fault of ours" in told
    assert "the node timed out" in told
    assert "Traceback" in told


def test_it_is_shown_even_when_ray_hangs_and_the_process_just_leaves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = BrokenRay(tmp_path / "log", hangs=True)
    left: list[int] = []

    def fail(*_: Any) -> None:  # whatever the method takes
        raise KeyError("in the middle of a start")

    monkeypatch.setattr(serving.Interrupts, "wait_for", fail)
    monkeypatch.setattr(serving, "STOP_BUSY_LIMIT_S", 0.1)
    monkeypatch.setattr(serving, "_leave", left.append)
    session(ray).run("127.0.0.1", 1)
    assert left == [1]
    assert "in the middle of a start" in capsys.readouterr().err


def test_a_ray_that_has_ended_is_found_out_while_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers after a minute, by ending this process too."""
    monkeypatch.setattr(serving, "WATCH_S", 0.05)
    ray, is_over = BrokenRay(tmp_path / "log", hangs=False), threading.Event()

    def watch() -> None:
        raise EngineError("Ray's process gcs_server has ended")

    monkeypatch.setattr(ray, "watch", watch)
    silent = cast("Deployment", SimpleNamespace(pools=lambda: is_over.wait(20)))
    interrupts = serving.Interrupts(on_second=lambda: None)
    with pytest.raises(EngineError, match="gcs_server has ended"):
        session(ray)._pools(interrupts, silent)
    is_over.set()
