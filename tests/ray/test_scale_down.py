"""A pool beside one that is awake, with paced workers: it is woken by what only it can serve, and
when its worker is taken away, streams end there within the drain limit or go on elsewhere.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from polypath.deployments.autoscaling_serve import POLICY
from polypath.tests.ray.deploying import deploying
from polypath.tests.ray.labelled_cluster import labelled_cluster
from polypath.tests.ray.test_named_cluster import free_port
from polypath.tests.ray.test_scaling import Client

pytestmark = [pytest.mark.ray, pytest.mark.slow]

START_LIMIT_S, WAKE_LIMIT_S = 300.0, 120.0
STEP_MS, DELAY_S = 50, 6.0
DRAIN_S = 3.0  # of a `PacedReplica`
SAYS = "abcdefgh"  # of every paced worker, over and over
# How long each of twelve streams takes: what only the spare worker could answer counts as demand
# for the 30 s over which arrivals are averaged, then its pool waits for DELAY_S.
STREAM_S = range(22, 46, 2)
NODES = [
    {"num_cpus": 1, "labels": {"pool": "head"}},
    {"num_cpus": 1, "labels": {"pool": "base", "step_ms": str(STEP_MS), "lacks": "penalties"}},
    {"num_cpus": 1, "labels": {"pool": "spare", "step_ms": str(STEP_MS)}},
]
POOLS = [
    {"name": "base", "num_cpus": 0.5, "label_selector": {"pool": "base"}, "cold_start_s": 30},
    {"name": "spare", "num_cpus": 0.5, "label_selector": {"pool": "spare"}, "cold_start_s": 60}
    | {"min_workers": 0, "max_workers": 1, "price": 5},
]


@pytest.fixture(scope="module")
def url(no_server: None, tiny_model: Path) -> Iterator[str]:
    """Of Serve's proxy; given in Ray's own kind of config."""
    port = free_port()
    model = {
        "model": str(tiny_model),
        "name": "tiny",
        "engine": {"max_num_seqs": 16},
        "scaling": {"target_queue_s": 1, "scale_down_delay_s": DELAY_S},
        "pools": POOLS,
    }
    application = {
        "name": "paced",
        "route_prefix": "/",
        "import_path": "polypath.tests.ray.own_replicas:paced_app",
        "autoscaling_policy": {"policy_function": POLICY},
        "args": {"models": [model]},
    }
    http = {"host": "127.0.0.1", "port": port}
    with labelled_cluster(NODES) as cluster, deploying(cluster) as deployer:
        deployer.deploy(
            {"proxy_location": "HeadOnly", "http_options": http, "applications": [application]}
        )
        found = f"http://127.0.0.1:{port}"
        _await(found)
        yield found


def _await(url: str) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        try:
            answer = httpx.get(f"{url}/v1/paths", timeout=30, trust_env=False)
            if answer.status_code == 200 and answer.json()["data"]:
                return
        except httpx.HTTPError:
            pass  # not there yet
        assert time.monotonic() < deadline, "the first worker did not come"
        time.sleep(0.5)


@pytest.fixture(scope="module")
def client(url: str) -> Client:
    return Client(url, "none")


def complete(url: str, require: str, **body: Any) -> httpx.Response:
    return httpx.post(
        f"{url}/v1/completions",
        json={"model": "tiny", "prompt": "x", "max_tokens": 16, **body},
        headers={"x-polypath-require": require},
        timeout=WAKE_LIMIT_S,
        trust_env=False,
    )


def stream(url: str, seconds: int) -> dict[str, Any]:
    """An answer of so many seconds, begun on the spare worker; what it says of itself. It holds the
    very tokens that an undisturbed one would.
    """
    num_tokens = seconds * 1000 // STEP_MS
    body = {"model": "tiny", "prompt": "x", "max_tokens": num_tokens, "stream": True}
    with (
        httpx.Client(timeout=WAKE_LIMIT_S, trust_env=False) as client,
        client.stream(
            "POST",
            f"{url}/v1/completions",
            json=body,
            headers={"x-polypath-prefer": "spare"},
        ) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    assert text == ((num_tokens // len(SAYS) + 1) * SAYS)[:num_tokens], text
    return events[-1]["polypath"]


def worker_of(client: Client, pool: str) -> str:
    return next(w["worker_id"] for w in client.get("/v1/paths")["data"] if w["pool"] == pool)


def test_what_no_pool_can_serve_wakes_none(url: str, client: Client) -> None:
    answer = complete(url, "pool=third")
    assert answer.status_code == 400 and "pool spare, without a worker now" in answer.text
    assert client.pools() == ["base"]


def test_a_sleeping_pool_wakes_for_what_the_awake_one_lacks(url: str, client: Client) -> None:
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(complete, url, "", presence_penalty=1.0)
        time.sleep(1)
        assert complete(url, "").headers["x-polypath-worker"] == worker_of(client, "base")
        assert not held.done(), held.result().text
        answer = held.result()
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == 2 * SAYS
    assert client.pools() == ["base", "spare"]
    assert answer.headers["x-polypath-worker"] == worker_of(client, "spare")


def test_a_worker_that_is_taken_away_ends_or_hands_over_its_streams(
    url: str, client: Client
) -> None:
    base, spare = worker_of(client, "base"), worker_of(client, "spare")
    with ThreadPoolExecutor(len(STREAM_S)) as pool:
        running = [pool.submit(stream, url, seconds) for seconds in STREAM_S]
        gone_s = client.wait_for(lambda: client.pools() == ["base"], WAKE_LIMIT_S)
        answers = [each.result() for each in running]
    stayed = [s for s, answer in zip(STREAM_S, answers, strict=True) if answer["trail"] == [spare]]
    moved = [a for a in answers if a["trail"] == [spare, base]]
    print(f"taken away after {gone_s:.1f} s; these ended there: {stayed}")
    assert len(stayed) + len(moved) == len(answers)
    assert any(seconds > gone_s for seconds in stayed), "one ended while the worker drained"
    assert moved and all(a["resumed"] for a in moved)
    assert max(stayed) < gone_s + DRAIN_S + 2 * STREAM_S.step
    assert client.pools() == ["base"] and client.get("/health")["models"] == {"tiny": "ok"}
