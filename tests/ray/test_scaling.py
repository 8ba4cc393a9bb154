"""Up, down and to zero on a real Ray: requests are held, none is lost, streams end in peace."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from polypath.deployments.keys import hash_key, new_key
from polypath.tests.ray.labelled_cluster import labelled_cluster
from polypath.tests.ray.running_server import RunningServer, serving_within

pytestmark = [pytest.mark.ray, pytest.mark.slow]

START_LIMIT_S = 300.0
WAKE_LIMIT_S = 120.0
DELAY_S = 8.0
NODES = [
    {"num_cpus": 1, "labels": {"pool": "head"}},
    {"num_cpus": 2, "labels": {"pool": "cheap"}},
    {"num_cpus": 2, "labels": {"pool": "dear"}},
]
FILE = """\
address: {address}
port: 0
gateway: {{num_cpus: 0.25}}
models:
  - model: {model}
    name: tiny
    engine: {{max_num_seqs: 1, max_waiting: 16, num_threads: 1, calibration: false}}
    prefer: [cheap]
    scaling: {{target_queue_s: 1, scale_down_delay_s: {delay}}}
    pools:
      - name: cheap
        num_cpus: 0.5
        label_selector: {{pool: cheap}}
        min_workers: 0
        max_workers: 1
        price: 1
        cold_start_s: 60
      - name: dear
        num_cpus: 0.5
        label_selector: {{pool: dear}}
        min_workers: 0
        max_workers: 1
        price: 5
        cold_start_s: 1
"""


@pytest.fixture(scope="module")
def key() -> str:
    return new_key()


@pytest.fixture(scope="module")
def fleet(
    no_server: None, tiny_model: Path, key: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """Two pools of at most one worker each, both asleep."""
    with labelled_cluster(NODES) as cluster:
        path = tmp_path_factory.mktemp("config") / "serve.yaml"
        path.write_text(FILE.format(address=cluster.address, model=tiny_model, delay=DELAY_S))
        environment = cluster.environment | {
            "POLYPATH_ADMIN_KEYS": hash_key(key),
            "POLYPATH_API_KEY": key,
        }
        with serving_within(START_LIMIT_S, ["--config", str(path)], environment) as server:
            yield server


class Client:
    """Asks as the operator."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {key}"}

    def get(self, path: str) -> Any:  # JSON
        answer = httpx.get(self._url + path, headers=self._headers, timeout=30, trust_env=False)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def pools(self) -> list[str]:
        """The pool of every worker that the gateway has."""
        return sorted(worker["pool"] for worker in self.get("/v1/paths")["data"])

    def busy_pools(self) -> set[str]:
        """Pools that have something to do right now."""
        return {w["pool"] for w in self.get("/v1/paths")["data"] if w["in_flight"]}

    def wait_for(self, is_so: Callable[[], bool], limit_s: float) -> float:
        began_s = time.monotonic()
        while not is_so():
            assert time.monotonic() - began_s < limit_s, self.get("/admin/scaling")
            time.sleep(0.2)
        return time.monotonic() - began_s

    @contextmanager
    def busy(self, num_streams: int, num_tokens: int) -> Iterator[list[dict[str, Any]]]:
        """So many streams at once, one after the other for as long as the block lasts: machines
        differ in speed. After it all answers are there.
        """
        answers: list[dict[str, Any]] = []
        is_over = threading.Event()

        def ask_on(number: int) -> list[dict[str, Any]]:
            found = [self.stream(number, num_tokens)]
            while not is_over.is_set():
                found.append(self.stream(number, num_tokens))
            return found

        with ThreadPoolExecutor(num_streams) as pool:
            running = [pool.submit(ask_on, number) for number in range(num_streams)]
            try:
                yield answers
            finally:
                is_over.set()
            answers += [answer for each in running for answer in each.result()]

    def stream(self, number: int, num_tokens: int) -> dict[str, Any]:
        """One streamed answer: its text, finish reason, and the trail of workers."""
        body = {
            "model": "tiny",
            "prompt": f"Number {number}",
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
        }
        text, last = "", {}
        with (
            httpx.Client(timeout=300, trust_env=False, headers=self._headers) as client,
            client.stream("POST", f"{self._url}/v1/completions", json=body) as response,
        ):
            assert response.status_code == 200, response.read()
            raw = b"".join(response.iter_bytes())
        assert raw.endswith(b"data: [DONE]\n\n"), raw[-500:]
        for event in raw.split(b"\n\n")[:-2]:
            if not event.startswith(b":"):
                last = json.loads(event.removeprefix(b"data: "))
                text += "".join(choice["text"] for choice in last["choices"])
        return {"text": text, "reason": last["choices"][0]["finish_reason"], **last["polypath"]}


@pytest.fixture(scope="module")
def client(fleet: RunningServer, key: str) -> Client:
    return Client(fleet.url, key)


def test_it_starts_asleep_and_is_well(client: Client) -> None:
    assert client.pools() == []
    assert client.get("/health")["models"] == {"tiny": "asleep"}
    time.sleep(5)
    assert client.pools() == [], "nothing asked for a worker"


def test_one_request_wakes_one_worker_of_the_cheap_pool_and_is_answered(client: Client) -> None:
    began_s = time.monotonic()
    answer = client.stream(1, 8)
    assert answer["reason"] == "length" and time.monotonic() - began_s < WAKE_LIMIT_S
    assert client.pools() == ["cheap"]
    said = client.get("/admin/scaling")
    assert said["errors"] == 0 and said["models"]["tiny"]["targets"]["tiny.dear"] == 0


def test_many_spill_into_the_dear_pool_and_all_are_answered(client: Client) -> None:
    with client.busy(12, 400) as answers:
        client.wait_for(lambda: client.busy_pools() == {"cheap", "dear"}, WAKE_LIMIT_S)
    assert {answer["reason"] for answer in answers} == {"length"}
    workers = {answer["trail"][0] for answer in answers}
    assert len(workers) == 2 and len(answers) >= 12


def test_it_goes_down_to_zero_after_the_delay_and_comes_back(client: Client) -> None:
    spent_s = client.wait_for(lambda: client.pools() == [], WAKE_LIMIT_S)
    assert spent_s >= DELAY_S - 3, "not before the delay"
    assert client.get("/health")["models"] == {"tiny": "asleep"}
    answer, again = client.stream(2, 8), client.stream(2, 8)
    assert answer["reason"] == "length" and again["text"] == answer["text"]
    assert client.pools() == ["cheap"]
    assert client.get("/admin/scaling")["errors"] == 0
