"""A Ray of our own needs a short private folder; a named one must answer, or we say so at once."""

from __future__ import annotations

import socket
import stat
import time
from pathlib import Path

import pytest

from polypath.deployments import ray_named
from polypath.deployments.ray_local import private_folder
from polypath.deployments.ray_named import NamedRay
from polypath.runtime.errors import ConfigurationError


def test_the_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.delenv("TMPDIR", raising=False)
    folder = private_folder()
    try:
        assert folder.parent == Path("/tmp")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    finally:
        folder.rmdir()


def test_a_long_temporary_path_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/tmp/" + "x" * 120)
    monkeypatch.setenv("TMPDIR", "/tmp/" + "y" * 120)
    folder = private_folder()
    folder.rmdir()
    assert len(str(folder)) < 40


def test_a_folder_that_is_not_there_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/nowhere")
    folder = private_folder()
    folder.rmdir()
    assert folder.parent != Path("/nowhere")


def test_a_dead_cluster_is_said_within_seconds_and_names_the_variable() -> None:
    began = time.monotonic()
    with pytest.raises(ConfigurationError) as caught:
        NamedRay("127.0.0.1:1", "RAY_ADDRESS").prepare()
    assert time.monotonic() - began < 5
    assert "RAY_ADDRESS names the Ray cluster 127.0.0.1:1" in str(caught.value)
    assert "unset RAY_ADDRESS" in str(caught.value)


def test_an_address_without_a_port_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="give HOST:PORT, auto, or local"):
        NamedRay("my-cluster", "--address").prepare()
    with pytest.raises(ConfigurationError, match="give HOST:PORT, auto, or local"):
        NamedRay("ray://10.0.0.1:10001", "--address").prepare()


def test_what_listens_there_and_is_no_ray_is_said_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections and never answers."""
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr(ray_named, "LOOK_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        named = NamedRay(f"127.0.0.1:{mute.getsockname()[1]}", "--address")
        with pytest.raises(ConfigurationError, match=r"could not reach .*: no answer in time"):
            named.look()
