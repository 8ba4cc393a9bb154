"""Ray's own autoscaler with its fake provider of nodes on this machine: pools that wake make nodes
of their kind come, and those go when they are idle.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from polypath.tests.ray.running_server import RunningServer, serving_within
from polypath.tests.ray.test_named_cluster import free_port
from polypath.tests.ray.test_scaling import Client

pytestmark = [pytest.mark.ray, pytest.mark.slow]

LIMIT_S = 240.0
HEAD_TYPE = "ray.head.default"  # these two are what the provider calls its head
STORE = {"object_store_memory": 80_000_000}  # bytes
HEAD_ID = "f" * 51 + "00000"
LAUNCHER = {
    "cluster_name": "fake",
    "max_workers": 4,
    "idle_timeout_minutes": 0.1,
    "upscaling_speed": 10,
    "available_node_types": {
        HEAD_TYPE: {
            "resources": {"CPU": 1},
            "labels": {"pool": "head"},
            "node_config": {},
            "max_workers": 0,
        },
        "cheap": {
            "resources": {"CPU": 1, **STORE},
            "labels": {"pool": "cheap"},
            "node_config": {},
            "min_workers": 0,
            "max_workers": 2,
        },
        "card": {
            "resources": {"CPU": 1, "card": 1, **STORE},
            "labels": {"pool": "card"},
            "node_config": {},
            "min_workers": 0,
            "max_workers": 2,
        },
    },
    "head_node_type": HEAD_TYPE,
    # What the launcher would fill in; the wheel lacks the provider's own defaults.
    **{name: {} for name in ("auth", "docker", "file_mounts")},
    **{name: [] for name in ("cluster_synced_files", "initialization_commands", "setup_commands")},
    **{f"{kind}_setup_commands": [] for kind in ("head", "worker")},
    **{f"{kind}_start_ray_commands": [] for kind in ("head", "worker")},
}
FILE = """\
address: {address}
port: 0
gateway: {{num_cpus: 0.25}}
models:
  - model: {model}
    name: tiny
    engine: {{max_num_seqs: 2, num_threads: 1, calibration: false}}
    scaling: {{scale_down_delay_s: 4}}
    pools:
      - {{name: cheap, num_cpus: 1, label_selector: {{pool: cheap}}, min_workers: 0,
          max_workers: 1, cold_start_s: 90}}
      - {{name: card, num_cpus: 1, resources: {{card: 1}}, min_workers: 0, max_workers: 1,
          price: 5, cold_start_s: 90}}
"""
NODES = """
import json, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
print(json.dumps([n["Labels"].get("pool") for n in ray.nodes() if n["Alive"]]))
"""


@dataclass
class Fake:
    """A head with an autoscaler on this machine."""

    address: str
    environment: dict[str, str]
    log: Path

    def kinds(self) -> list[str]:
        """The label `pool` of every node that is there."""
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", NODES, self.address],
            capture_output=True,
            text=True,
            timeout=120,
            env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | self.environment,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return sorted(json.loads(done.stdout.splitlines()[-1]))

    def wait_for(self, kinds: list[str]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while (found := self.kinds()) != kinds:
            assert time.monotonic() < deadline, (found, self.log.read_text()[-3000:])
            time.sleep(1)


@pytest.fixture(scope="module")
def fake(no_server: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fake]:
    folder = tmp_path_factory.mktemp("fake")
    from ray.util import get_node_ip_address

    launcher = folder / "fake.yaml"
    port = free_port()
    address = f"{get_node_ip_address()}:{port}"
    # Not by its name: for that Ray opens defaults in a file that its wheel lacks.
    provider = {
        "type": "external",
        "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
        "launch_multiple": True,
        "disable_node_updaters": True,
        "head_node_id": HEAD_ID,
        "gcs_address": address,
    }
    launcher.write_text(yaml.safe_dump({**LAUNCHER, "provider": provider}))
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_raylet_start_wait_time_s": "120",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [
        str(Path(sys.executable).with_name("ray")),
        *("start", "--head", "--block", f"--port={port}"),
        *("--num-cpus=1", "--labels=pool=head", "--include-dashboard=false"),
        *(f"--autoscaling-config={launcher}", "--object-store-memory=80000000"),
        "--disable-usage-stats",
    ]
    log = folder / "head.log"
    env: dict[str, Any] = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    of_head = {
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            env=env | environment | of_head,
            start_new_session=True,
        )
    found = Fake(address, environment, log)
    try:
        _await(found, process)
        yield found
    finally:
        _end(process)


def _await(fake: Fake, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while "Ray runtime started" not in fake.log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, fake.log.read_text()
        time.sleep(0.5)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The head and everything that it started, fake nodes included."""
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
    _, alive = psutil.wait_procs(family, timeout=10)
    for left in alive:
        left.kill()


@pytest.fixture(scope="module")
def server(
    fake: Fake, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    path = tmp_path_factory.mktemp("config") / "serve.yaml"
    path.write_text(FILE.format(address=fake.address, model=tiny_model))
    with serving_within(LIMIT_S, ["--config", str(path)], fake.environment) as running:
        yield running


def ask(server: RunningServer, pool: str) -> str:
    """An answer of this pool: the label `pool` of the node whose worker gave it."""
    answer = httpx.post(
        f"{server.url}/v1/completions",
        json={"model": "tiny", "prompt": "x", "max_tokens": 4, "ignore_eos": True},
        headers={"x-polypath-require": f"pool={pool}"},
        timeout=LIMIT_S,
        trust_env=False,
    )
    assert answer.status_code == 200, answer.text
    named = answer.headers["x-polypath-worker"]
    workers = Client(server.url, "none").get("/v1/paths")["data"]
    (found,) = (worker for worker in workers if worker["worker_id"] == named)
    return found["node"]["labels"]["pool"]


def test_nodes_come_by_kind_when_a_pool_needs_them_and_go_when_idle(
    fake: Fake, server: RunningServer
) -> None:
    assert fake.kinds() == ["head"]
    assert ask(server, "cheap") == "cheap", "a node of the kind that the pool selects"
    assert ask(server, "card") == "card", "one that has what the pool's workers take"
    fake.wait_for(["head"])
    assert Client(server.url, "none").get("/health")["models"] == {"tiny": "asleep"}
