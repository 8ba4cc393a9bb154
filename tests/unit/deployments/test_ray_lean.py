"""A Ray of our own starts fewer processes, by switches that a next Ray may move."""

from __future__ import annotations

import socket
import sys

import pytest

from polypath.deployments.ray_lean import LEAN, lean_ray

parameter = pytest.importorskip("ray._private.parameter")


def test_the_switches_are_set_around_the_start_only() -> None:
    usual = parameter.RayParams
    with lean_ray():
        made = parameter.RayParams(num_cpus=1)
        assert {name: getattr(made, name) for name in LEAN} == LEAN
    assert parameter.RayParams is usual


def test_a_failed_start_leaves_ray_as_it_was() -> None:
    usual = parameter.RayParams
    with pytest.raises(RuntimeError), lean_ray():
        raise RuntimeError("no room")
    assert parameter.RayParams is usual


@pytest.mark.parametrize("lacks", ["module", "class"])
def test_a_ray_that_moved_them_starts_as_ever_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lacks: str
) -> None:
    """A moved module ended the start."""
    if lacks == "module":
        monkeypatch.setitem(sys.modules, "ray._private.parameter", None)
    else:
        monkeypatch.delattr(parameter, "RayParams")
    with lean_ray() as port:
        assert port > 0
    assert "no_monitor" in caplog.text


def test_a_ray_without_the_switches_starts_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def moved(*, num_cpus: int) -> int:
        return num_cpus

    monkeypatch.setattr(parameter, "RayParams", moved)
    with lean_ray():
        assert parameter.RayParams is moved


def test_the_port_it_names_cannot_be_had() -> None:
    """Ray tries it as here, and then starts no process for its dashboard."""
    with lean_ray() as port, socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            tried.bind(("127.0.0.1", port))
