"""A Ray that the user named is used and left as it was found."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from polypath.deployments.listen import claim
from polypath.tests.ray.running_server import run, serving

pytestmark = [pytest.mark.ray, pytest.mark.slow]

RAY = str(Path(sys.executable).with_name("ray"))


@pytest.fixture(scope="module", params=["token", "disabled"])
def cluster(request: pytest.FixtureRequest, no_server: None) -> Iterator[str]:
    """A Ray of two CPUs, started as an administrator would, with and without Ray's token."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short, for Ray's sockets
    address = f"127.0.0.1:{free_port()}"
    environment = os.environ | {"RAY_AUTH_MODE": request.param, "RAY_AUTH_TOKEN": "a" * 64}
    before = {p.pid for p in psutil.process_iter()}
    command = [RAY, "start", "--head", "--port", address.rpartition(":")[2], "--num-cpus", "2"]
    command += ["--temp-dir", folder, "--include-dashboard", "false"]
    command += ["--object-store-memory", "80000000", "--dashboard-agent-listen-port", "0"]
    subprocess.run(command, check=True, capture_output=True, env=environment, timeout=120)
    ours = [p for p in psutil.process_iter() if p.pid not in before and folder in name(p)]
    try:
        yield address
    finally:
        for process in ours:
            process.kill()
        psutil.wait_procs(ours, timeout=10)
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    """One that nobody gets who asks the system for any, as Ray's processes do."""
    return claim("127.0.0.1", 0)[1]


def name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def is_listening(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def test_it_is_used_and_left_running(cluster: str, tiny_model: Path) -> None:
    arguments = [str(tiny_model), "--port", "0", "--address", cluster]
    with serving(arguments, RAY_AUTH_TOKEN="a" * 64) as server:
        assert f"the Ray at {cluster} (named by --address)" in server.output
        assert server.get("/health")["status"] == "ok"
        second = [*arguments[:2], str(free_port()), *arguments[3:]]
        code, output = run(["serve", *second], RAY_AUTH_TOKEN="a" * 64)
        assert code == 2
        assert "already runs an application named polypath" in output
        code, output = run(["serve", *second, "--check"], RAY_AUTH_TOKEN="a" * 64)
        assert code == 2 and "already runs an application named polypath" in output
        assert server.get("/health")["status"] == "ok"
        assert server.stop(signal.SIGINT) == 0
        assert "Ray stays" in server.output
        deadline = time.monotonic() + 10
        while server.url and _answers(server.url):
            assert time.monotonic() < deadline, "the API still answers"
            time.sleep(0.2)
    assert is_listening(cluster)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
