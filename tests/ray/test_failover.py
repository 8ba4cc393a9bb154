"""Three workers on three labelled nodes: headers pick among them, and killing or stopping some of
them under 16 streams changes no token of any answer.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from polypath.tests.ray.labelled_cluster import labelled_cluster
from polypath.tests.ray.running_server import RunningServer, serving_within

pytestmark = [pytest.mark.ray, pytest.mark.slow]

START_LIMIT_S = 300.0
NUM_TOKENS = 600
NODES = [
    {"num_cpus": 1, "labels": {"zone": "a"}},
    {"num_cpus": 1, "labels": {"zone": "b"}},
    {"num_cpus": 1, "labels": {"zone": "c"}},
]
FILE = """\
address: {address}
port: 0
gateway: {{num_cpus: 0.25}}
models:
  - model: {model}
    name: tiny
    engine: {{max_num_seqs: 16, num_threads: 1}}
    pools:
      - {{name: a, num_cpus: 0.5, label_selector: {{zone: a}}}}
      - {{name: b, num_cpus: 0.5, label_selector: {{zone: b}}}}
      - {{name: c, num_cpus: 0.5, label_selector: {{zone: c}}}}
"""
BODIES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.8, "seed": 12, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 1.0, "seed": 13, "n": 2},
    {"temperature": 1.0, "seed": 14, "logprobs": 2, "repetition_penalty": 1.3},
]


@pytest.fixture(scope="module")
def fleet(
    no_server: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """Three workers, one a node."""
    with labelled_cluster(NODES) as cluster:
        path = tmp_path_factory.mktemp("config") / "serve.yaml"
        path.write_text(FILE.format(address=cluster.address, model=tiny_model))
        arguments = ["--config", str(path)]
        with serving_within(START_LIMIT_S, arguments, cluster.environment) as server:
            wait_for_workers(server, 3)
            yield server


def workers(server: RunningServer) -> list[dict[str, Any]]:
    return server.get("/v1/paths")["data"]


def wait_for_workers(server: RunningServer, count: int, limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while sum(worker["stats"] is not None for worker in workers(server)) < count:
        assert time.monotonic() < deadline, f"not {count} workers after {limit_s:.0f} s"
        time.sleep(0.2)


def wait_until_idle(server: RunningServer, limit_s: float = 15.0) -> None:
    """No worker runs, queues or holds anything."""
    deadline = time.monotonic() + limit_s
    while True:
        stats = [worker["stats"] for worker in workers(server) if worker["stats"] is not None]
        busy = [each for each in stats if each["running"] or each["waiting"]]
        if not busy and not any(each["kv_pages_used"] for each in stats):
            return
        assert time.monotonic() < deadline, f"still busy: {busy}"
        time.sleep(0.1)


def stream(
    server: RunningServer, number: int, headers: dict[str, str] | None = None
) -> dict[str, Any]:
    """One streamed answer, joined: texts by choice, finish reasons, usage, `polypath`."""
    body = BODIES[number % len(BODIES)] | {
        "model": "tiny",
        "prompt": f"Number {number} speaks",
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    last: dict[str, Any] = {}
    url = f"{server.url}/v1/completions"
    with (
        httpx.Client(timeout=180, trust_env=False, verify=False) as client,
        client.stream("POST", url, json=body, headers=headers or {}) as response,
    ):
        assert response.status_code == 200, response.read()
        raw = b"".join(response.iter_bytes())
    assert raw.endswith(b"data: [DONE]\n\n"), raw[-300:]
    for event in raw.split(b"\n\n")[:-2]:
        if event.startswith(b":"):
            continue
        last = json.loads(event.removeprefix(b"data: "))
        for choice in last["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + choice["text"]
            if choice["finish_reason"] is not None:
                ends[index] = choice["finish_reason"]
    return {"texts": texts, "ends": ends, "usage": last["usage"], "polypath": last["polypath"]}


def same(answer: dict[str, Any], expected: dict[str, Any]) -> bool:
    usages = [each["usage"]["completion_tokens"] for each in (answer, expected)]
    return (answer["texts"], answer["ends"]) == (expected["texts"], expected["ends"]) and (
        usages[0] == usages[1]
    )


def run_streams(server: RunningServer, disturb: Any = None) -> list[dict[str, Any]]:
    """Sixteen at once; `disturb` is called once most of them run: the first may have ended when the
    last begins.
    """
    with ThreadPoolExecutor(16) as pool:
        running = [pool.submit(stream, server, number) for number in range(16)]
        if disturb is not None:
            deadline = time.monotonic() + 60
            while sum(worker["in_flight"] for worker in workers(server)) < 10:
                assert time.monotonic() < deadline, "the streams never ran together"
            disturb()
        return [each.result() for each in running]


@pytest.fixture(scope="module")
def undisturbed(fleet: RunningServer) -> list[dict[str, Any]]:
    answers = run_streams(fleet)
    assert not any("resumed" in answer["polypath"] for answer in answers)
    return answers


def busiest(server: RunningServer) -> dict[str, Any]:
    return max(workers(server), key=lambda worker: worker["in_flight"])


def test_headers_pick_among_nodes(fleet: RunningServer) -> None:
    by_zone = {worker["pool"]: worker["worker_id"] for worker in workers(fleet)}
    assert set(by_zone) == {"a", "b", "c"}
    body = {"model": "tiny", "prompt": "x", "max_tokens": 2}
    with httpx.Client(timeout=60, trust_env=False) as client:
        for zone, worker_id in by_zone.items():
            for requires in (f"pool={zone}", f"label.zone={zone}", f"worker={worker_id}"):
                headers = {"x-polypath-require": requires, "x-polypath-debug": "route"}
                url = f"{fleet.url}/v1/completions"
                answer = client.post(url, json=body, headers=headers)
                assert answer.headers["x-polypath-worker"] == worker_id, requires
                route = json.loads(answer.headers["x-polypath-route"])
                assert len(route["candidates"]) == 3
        headers = {"x-polypath-require": "label.zone=d"}
        answer = client.post(f"{fleet.url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 400
    assert all(worker_id in answer.json()["error"]["message"] for worker_id in by_zone.values())


def test_a_killed_worker_breaks_no_stream(
    fleet: RunningServer, undisturbed: list[dict[str, Any]]
) -> None:
    killed = busiest_id = ""

    def kill() -> None:
        nonlocal killed, busiest_id
        found = busiest(fleet)
        killed, busiest_id = str(found["pid"]), found["worker_id"]
        os.kill(found["pid"], signal.SIGKILL)

    answers = run_streams(fleet, kill)
    assert killed
    resumed = [answer for answer in answers if "resumed" in answer["polypath"]]
    assert resumed, "the busiest worker had something to lose"
    assert all(answer["polypath"]["trail"][0] for answer in answers)
    for number, (answer, expected) in enumerate(zip(answers, undisturbed, strict=True)):
        assert same(answer, expected), f"stream {number} differs: {answer['polypath']}"
    for answer in resumed:
        for change in answer["polypath"]["resumed"]:
            assert change["from"] == busiest_id
            assert change["changed"] == {}
    wait_for_workers(fleet, 3)
    wait_until_idle(fleet)


def test_two_kills_in_a_row_break_no_stream(
    fleet: RunningServer, undisturbed: list[dict[str, Any]]
) -> None:
    def kill_twice() -> None:
        os.kill(busiest(fleet)["pid"], signal.SIGKILL)
        time.sleep(0.3)
        alive = [worker for worker in workers(fleet) if worker["stats"] is not None]
        os.kill(max(alive, key=lambda worker: worker["in_flight"])["pid"], signal.SIGKILL)

    answers = run_streams(fleet, kill_twice)
    for number, (answer, expected) in enumerate(zip(answers, undisturbed, strict=True)):
        assert same(answer, expected), f"stream {number} differs: {answer['polypath']}"
    wait_for_workers(fleet, 3)
    wait_until_idle(fleet)


def test_a_worker_that_stops_and_comes_back_changes_nothing(
    fleet: RunningServer, undisturbed: list[dict[str, Any]]
) -> None:
    stopped: list[dict[str, Any]] = []
    since_s = 0.0

    def stop() -> None:
        nonlocal since_s
        stopped.append(busiest(fleet))
        since_s = time.monotonic()
        os.kill(stopped[0]["pid"], signal.SIGSTOP)

    try:
        answers = run_streams(fleet, stop)
        time.sleep(max(0.0, since_s + 30.0 - time.monotonic()))
    finally:
        os.kill(stopped[0]["pid"], signal.SIGCONT)
    assert any("resumed" in answer["polypath"] for answer in answers)
    for number, (answer, expected) in enumerate(zip(answers, undisturbed, strict=True)):
        assert same(answer, expected), f"stream {number} differs: {answer['polypath']}"
    wait_for_workers(fleet, 3)
    wait_until_idle(fleet)
    back = {worker["worker_id"] for worker in workers(fleet)}
    assert stopped[0]["worker_id"] in back, "the same process serves again"
    headers = {"x-polypath-require": f"worker={stopped[0]['worker_id']}"}
    assert same(stream(fleet, 0, headers), undisturbed[0])
