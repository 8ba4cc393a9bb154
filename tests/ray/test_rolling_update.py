"""Updates in Serve's declarative form while requests go on: a changed option replaces all workers,
a broken version stops at its first one; no request fails either way.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from polypath.tests.ray.labelled_cluster import LabelledCluster, labelled_cluster
from polypath.tests.ray.test_named_cluster import free_port

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NODES = [{"num_cpus": 2, "labels": {"pool": "head"}}, {"num_cpus": 4, "labels": {"pool": "work"}}]
LIMIT_S = 240.0
APP = "polypath.deployments.app:app"
SICK_APP = "polypath.tests.ray.own_replicas:sick_app"
DRIVER = """
import json, sys, ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema
address, port, config = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
ray.init(address=address, log_to_driver=False, logging_level="error")
if config:
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config))
app = serve.status().applications.get("updated")
found = {n: [str(d.status), d.message] for n, d in app.deployments.items()} if app else {}
print(json.dumps({"status": str(app.status), "message": app.message, "deployments": found}))
"""


@dataclass
class Updated:
    """The application on its cluster."""

    cluster: LabelledCluster
    port: int
    model: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def deploy(
        self, model: str | None = None, *, app: str = APP, surge: int = 100, **engine: Any
    ) -> None:
        pool = {"name": "p", "num_cpus": 0.5, "min_workers": 2, "max_surge_percent": surge}
        described = {
            "model": model or self.model,
            "name": "tiny",
            "engine": {"num_threads": 1, "calibration": False} | engine,
            "pools": [pool | {"label_selector": {"pool": "work"}}],
        }
        application = {
            "name": "updated",
            "route_prefix": "/",
            "import_path": app,
            "args": {"models": [described]},
        }
        self.run({"applications": [application]})

    def run(self, config: dict[str, Any] | None = None) -> dict[str, Any]:  # JSON
        """Hand a configuration over, or none; what Serve says of the application."""
        arguments = [self.cluster.address, str(self.port), json.dumps(config)]
        env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", DRIVER, *arguments],
            capture_output=True,
            text=True,
            timeout=180,
            env=env | self.cluster.environment,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    def workers(self) -> list[dict[str, Any]]:  # JSON
        try:
            answer = httpx.get(f"{self.url}/v1/paths", timeout=30, trust_env=False)
            return answer.json()["data"] if answer.status_code == 200 else []
        except httpx.HTTPError:
            return []

    def places(self) -> list[int]:
        """`max_num_seqs` of every worker."""
        return sorted(worker["plan"]["max_num_seqs"] for worker in self.workers())

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not is_so():
            assert time.monotonic() < deadline, (self.places(), self.run())
            time.sleep(0.5)


@pytest.fixture(scope="module")
def updated(no_server: None, tiny_model: Path) -> Iterator[Updated]:
    with labelled_cluster(NODES) as cluster:
        found = Updated(cluster, free_port(), str(tiny_model))
        found.deploy(max_num_seqs=4)
        found.wait_for(lambda: found.places() == [4, 4])
        yield found


@dataclass
class Traffic:
    """Short requests and longer streams, one after the other, until told to stop. With pauses: new
    workers start on the same cores.
    """

    url: str
    faults: list[str] = field(default_factory=list)
    num_done: int = 0
    num_tokens: list[int] = field(default_factory=list)  # of each stream
    _over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Traffic:
        work = [self._short, self._streams]
        self._threads = [threading.Thread(target=each) for each in work]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(120)

    def _short(self) -> None:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 2, "ignore_eos": True}
        with httpx.Client(timeout=120, trust_env=False) as client:
            while not self._over.is_set():
                self._note(lambda: client.post(f"{self.url}/v1/completions", json=body), 2)
                time.sleep(0.3)

    def _streams(self) -> None:
        body = {"model": "tiny", "prompt": "b", "max_tokens": 1000, "ignore_eos": True}
        with httpx.Client(timeout=120, trust_env=False) as client:
            while not self._over.is_set():
                self._stream(client, body | {"stream": True})
                time.sleep(2)

    def _stream(self, client: httpx.Client, body: dict[str, Any]) -> None:
        try:
            with client.stream("POST", f"{self.url}/v1/completions", json=body) as answer:
                raw = answer.read().decode()
        except httpx.HTTPError as error:
            self.faults.append(f"a stream broke: {error!r}")
            return
        if answer.status_code != 200 or not raw.endswith("data: [DONE]\n\n"):
            self.faults.append(f"{answer.status_code}: {raw[-500:]}")
        self.num_tokens.append(raw.count('"text"'))

    def _note(self, ask: Callable[[], httpx.Response], num_tokens: int) -> None:
        try:
            answer = ask()
        except httpx.HTTPError as error:
            self.faults.append(f"a request broke: {error!r}")
            return
        self.num_done += 1
        if answer.status_code != 200 or answer.json()["usage"]["completion_tokens"] != num_tokens:
            self.faults.append(f"{answer.status_code}: {answer.text[:500]}")


def test_a_changed_option_replaces_every_worker_and_no_request_fails(updated: Updated) -> None:
    before = {worker["worker_id"] for worker in updated.workers()}
    with Traffic(updated.url) as traffic:
        time.sleep(2)
        updated.deploy(max_num_seqs=3)
        updated.wait_for(lambda: updated.places() == [3, 3])
        time.sleep(2)
    assert traffic.faults == []
    assert traffic.num_done > 20 and traffic.num_tokens
    assert not before & {worker["worker_id"] for worker in updated.workers()}


def test_a_broken_version_stops_at_its_first_worker_and_the_old_ones_serve(
    updated: Updated, tmp_path: Path
) -> None:
    before = {worker["worker_id"] for worker in updated.workers()}
    with Traffic(updated.url) as traffic:
        updated.deploy(model=str(tmp_path / "no-such-model"))
        updated.wait_for(lambda: "DEPLOY_FAILED" in updated.run()["status"])
        said = updated.run()
        time.sleep(2)
    assert traffic.faults == []
    assert {worker["worker_id"] for worker in updated.workers()} == before
    assert "no-such-model" in json.dumps(said), said


def test_going_back_ends_the_failure(updated: Updated) -> None:
    with Traffic(updated.url) as traffic:
        updated.deploy(max_num_seqs=3)
        updated.wait_for(lambda: "RUNNING" in updated.run()["status"])
        updated.wait_for(lambda: updated.places() == [3, 3])
    assert traffic.faults == []


def test_a_version_that_is_ready_and_then_sick_stops_before_the_last_old_worker(
    updated: Updated,
) -> None:
    """One at a time beside the old ones: while the second starts, the first is found to be sick."""
    before = {worker["worker_id"] for worker in updated.workers()}
    with Traffic(updated.url) as traffic:
        updated.deploy(app=SICK_APP, surge=50, max_num_seqs=5)
        updated.wait_for(lambda: 5 in updated.places())
        updated.wait_for(lambda: "DEPLOY_FAILED" in updated.run()["status"])
        updated.wait_for(lambda: updated.places() == [3])
        time.sleep(5)
        said = updated.run()
        assert {worker["worker_id"] for worker in updated.workers()} < before
        status, why = said["deployments"]["tiny.p"]
        assert "DEPLOY_FAILED" in status and "failed its health check" in why, said
        updated.deploy(max_num_seqs=4)
        updated.wait_for(lambda: updated.places() == [4, 4])
    assert traffic.faults == []
    assert traffic.num_done > 20 and traffic.num_tokens
