"""What the running application opens, logs and survives."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from openai import OpenAI

from polypath.tests.ray.running_server import RunningServer

pytestmark = pytest.mark.ray

FOLDER = r"--temp[-_]dir=(\S+)/ray\b"
HELLO = [{"role": "user", "content": "Hello"}]


def ask(server: RunningServer) -> int:
    """The status of a small chat."""
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 2}
    url = f"{server.url}/v1/chat/completions"
    return httpx.post(url, json=body, timeout=30, trust_env=False).status_code


def ids(server: RunningServer) -> list[str]:
    """Of the workers that the gateway knows."""
    return [worker["worker_id"] for worker in server.get("/v1/paths")["data"]]


def test_start_up_prints_at_most_thirty_lines_and_no_chatter(server: RunningServer) -> None:
    assert len(server.lines) <= 30, server.output
    for word in ("Warning", "WARN", "INFO", "Traceback", "deprecated", "(raylet)"):
        assert word not in server.output


def test_only_loopback_listens_but_for_serves_replicas(server: RunningServer) -> None:
    """Serve gives each replica a gRPC port on all addresses; it asks for this run's Ray token."""
    replicas = [p for p in server.look() if "ServeReplica" in " ".join(p.cmdline())]
    assert len(replicas) == 2
    open_to_all: list[int] = []
    for process in [psutil.Process(server.process.pid), *server.family]:
        for connection in process.net_connections(kind="tcp"):
            if connection.status != psutil.CONN_LISTEN:
                continue
            address = connection.laddr[0].removeprefix("::ffff:")
            if address not in ("127.0.0.1", "::1"):
                open_to_all.append(process.pid)
    assert sorted(open_to_all) == sorted(p.pid for p in replicas)


def test_the_token_of_the_run_is_not_in_what_others_can_see(server: RunningServer) -> None:
    lines = [" ".join(p.cmdline()) for p in server.look()]
    assert not any("RAY_AUTH_TOKEN" in line or "auth_token" in line for line in lines)


@pytest.mark.parametrize(
    ("sent", "echoed"),
    [(b"mine", "mine"), (b"a%0d%0aINFO forged", "a0d0aINFOforged"), (b"x" * 9000, "x" * 128)],
)
def test_one_clean_request_id_is_echoed(server: RunningServer, sent: bytes, echoed: str) -> None:
    found = get(server, (b"X-Request-Id", sent))
    assert found.headers.get_list("x-request-id") == [echoed]


@pytest.mark.parametrize(
    "header",
    [
        (b"X-Request-Id", b"\xff\xfe"),
        (b"X-Request-Timeout-Seconds", b"0.000001"),
        (b"X-Request-Timeout-Seconds", b"\xff"),
        (b"Serve_Multiplexed_Model_Id", b"\xff"),
        (b"X-Session-Id", b"\xff"),
    ],
)
def test_a_header_that_serve_reads_harms_nothing(
    server: RunningServer, header: tuple[bytes, bytes]
) -> None:
    assert get(server, header).status_code == 200


def test_headers_of_64_kb_are_a_431(server: RunningServer) -> None:
    found = get(server, (b"X-Big", b"x" * 65536))
    assert found.status_code == 431
    assert found.json()["error"]["code"] == "headers_too_large"


def get(server: RunningServer, header: tuple[bytes, bytes]) -> httpx.Response:
    """The models, asked for with one more header."""
    url = f"{server.url}/v1/models"
    return httpx.get(url, headers=[header], timeout=30, trust_env=False)


def test_a_killed_worker_is_replaced_and_the_gateway_recovers(
    server: RunningServer, client: OpenAI
) -> None:
    before = server.worker()
    stream = client.completions.create(
        model="tiny", prompt="Hello", max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    os.kill(before["pid"], signal.SIGKILL)
    try:
        last = list(stream)[-1]
    except openai.APIError as error:  # an SSE error event: no new worker in time
        assert "the worker died" in str(error)
    else:  # it went on with the new worker
        assert last.model_extra is not None
        assert len(last.model_extra["polypath"]["trail"]) == 2
        assert last.choices[0].finish_reason == "length"
    deadline = time.monotonic() + 90  # 4 s on an idle machine
    # The list of workers follows within a moment: until then it may show the old one or none.
    while ask(server) != 200 or ids(server) in ([], [before["worker_id"]]):
        assert time.monotonic() < deadline, "no new worker after 90 s"
        time.sleep(0.5)
    after = server.worker()
    assert after["pid"] != before["pid"]
    assert after["fingerprint"] == before["fingerprint"]
    deadline = time.monotonic() + 5
    while "the worker is back" not in server.output:
        assert time.monotonic() < deadline, server.output
        time.sleep(0.1)
    assert "the worker died; a new one is starting" in server.output


def test_nothing_runs_that_nothing_of_ours_talks_to(server: RunningServer) -> None:
    """Should a next Ray have moved the switches of ray_lean.py, this is where it shows."""
    commands = [" ".join(process.cmdline()) for process in server.look()]
    unwanted = ("monitor.py", "dashboard.py")
    assert not [c for c in commands if any(name in c for name in unwanted)]


def test_a_process_that_ray_started_ahead_imported_torch_and_became_a_worker(
    server: RunningServer,
) -> None:
    commands = {process.pid: " ".join(process.cmdline()) for process in server.look()}
    (folder,) = {found[0] for c in commands.values() if (found := re.findall(FOLDER, c))}
    pid = int((Path(folder) / "worker").read_text())
    assert "ServeReplica:polypath:worker" in commands.get(pid, "ServeReplica:polypath:worker")
