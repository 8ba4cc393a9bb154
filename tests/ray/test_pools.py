"""Models in pools over three unlike nodes: each worker lands where its pool says, and says so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from polypath.tests.ray.labelled_cluster import LabelledCluster, labelled_cluster
from polypath.tests.ray.running_server import RunningServer, run, serving_within
from polypath.tests.ray.test_named_cluster import free_port
from polypath.tests.tiny_models import random

pytestmark = [pytest.mark.ray, pytest.mark.slow]

START_LIMIT_S = 300.0  # four workers and a gateway on whatever this machine has
NODES = [
    {"num_cpus": 1, "labels": {"pool": "head"}},
    {"num_cpus": 2, "labels": {"pool": "big", "zone": "a"}, "resources": {"slots": 2}},
    {"num_cpus": 1, "labels": {"pool": "small", "zone": "b"}},
]
FILE = """\
address: {address}
port: 0
gateway: {{num_cpus: 0.25}}
models:
  - model: {first}
    name: first
    engine: {{max_num_seqs: 4}}
    pools:
      - name: big
        num_cpus: 0.75
        resources: {{slots: 1}}
        label_selector: {{pool: "in(big,huge)"}}
        engine: {{max_num_seqs: 2, runner: eager}}
      - name: small
        num_cpus: 0.5
        label_selector: {{zone: "!in(a)", pool: "!head"}}
  - model: {second}
    name: second
    pools:
      - {{name: big, num_cpus: 0.5, label_selector: {{pool: big}}, min_workers: 2}}
"""


@pytest.fixture(scope="module")
def cluster(no_server: None) -> Iterator[LabelledCluster]:
    with labelled_cluster(NODES) as found:
        yield found


@pytest.fixture(scope="module")
def second_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "second"
    random(folder)
    return folder


@pytest.fixture(scope="module")
def file(
    cluster: LabelledCluster,
    tiny_model: Path,
    second_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    path = tmp_path_factory.mktemp("config") / "serve.yaml"
    path.write_text(FILE.format(address=cluster.address, first=tiny_model, second=second_model))
    return path


def test_a_check_does_not_join_the_cluster_and_takes_little(
    cluster: LabelledCluster, tiny_model: Path, tmp_path: Path
) -> None:
    """The first to join a node waits until Ray has started a process for each of its CPUs. Who asks
    the head for its tables waits for nothing: what is left is our own CPU time.
    """
    path = tmp_path / "serve.yaml"
    pool = "{name: p, num_cpus: 0.5, label_selector: {pool: big}}"
    path.write_text(f"models: [{{model: {tiny_model}, pools: [{pool}]}}]")
    arguments = ["serve", "--config", str(path), "--port", "0", "--address", cluster.address]
    before = os.times()
    code, output = run([*arguments, "--check"], timeout_s=120, **cluster.environment)
    after = os.times()
    assert code == 0, output
    cpu_s = after.children_user + after.children_system
    assert cpu_s - before.children_user - before.children_system < 5
    program = """
import sys
from polypath.deployments.cluster_state import ClusterState
print(len(ClusterState(sys.argv[1])._tables.job_table()))
"""
    command = [sys.executable, "-c", program, cluster.address]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=_with(cluster.environment)
    )
    assert done.stdout == "0\n", done


@pytest.mark.parametrize(
    ("pools", "expected"),
    [
        ("[{name: p, label_selector: {pool: smal}}]", "has pool=smal; did you mean small?"),
        ("[{name: p, num_cpus: 3}]", "a worker takes 3 CPUs, and no node that fits"),
        ("[{name: p, resources: {slot: 1}}]", "a resource slot; did you mean slots?"),
        ("[{name: p, num_gpus: 1}]", "no node that fits has a GPU"),
        ("[{name: p, num_cpus: 1, min_workers: 9}]", "of its 9 workers beside what else runs"),
    ],
)
def test_what_fits_no_node_is_refused_before_anything_starts(
    cluster: LabelledCluster, tiny_model: Path, tmp_path: Path, pools: str, expected: str
) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(f"models: [{{model: {tiny_model}, pools: {pools}}}]")
    arguments = ["serve", "--config", str(path), "--port", "0", "--address", cluster.address]
    code, output = run([*arguments, "--check"], timeout_s=120, **cluster.environment)
    assert code == 2 and expected in output.replace("\n", " "), output


def test_a_start_is_refused_as_the_check_is(cluster: LabelledCluster, file: Path) -> None:
    wrong = file.with_name("wrong.yaml")
    wrong.write_text(file.read_text().replace("pool: big}", "pool: bug}"))
    code, output = run(["serve", "--config", str(wrong)], timeout_s=120, **cluster.environment)
    assert code == 2, output
    assert "wrong.yaml, line 20: pool big of second: no node has pool=bug; did you mean" in output


def test_auto_prints_what_it_derived(
    cluster: LabelledCluster, tiny_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(f"models: [{{model: {tiny_model}, pools: auto}}]")
    arguments = ["serve", "--config", str(path), "--port", "0", "--address", cluster.address]
    code, output = run([*arguments, "--check"], timeout_s=120, **cluster.environment)
    assert code == 0, output
    for name, cpus in (("head", 0.75), ("big", 1.75), ("small", 0.75)):
        assert f"- name: {name}" in output and f"pool {name}: 1 workers" in output
        assert f"num_cpus: {cpus}" in output
    assert "pool: small" in output, output


def test_ray_reads_selectors_as_the_check_does(cluster: LabelledCluster) -> None:
    """A task for each selector runs on a node that our own matching allows, absent labels too."""
    program = """
import json, sys, ray
from polypath.deployments.label_selector import matches
from polypath.deployments.cluster_state import ClusterState
from polypath.deployments.nodes import ray_nodes
ray.init(address=sys.argv[1], log_to_driver=False)
labels = {node.id: node.labels for node in ray_nodes(ClusterState(sys.argv[1]))}
@ray.remote(num_cpus=0.01)
def where():
    return ray.get_runtime_context().get_node_id()
for selector in json.loads(sys.argv[2]):
    found = ray.get(where.options(label_selector=selector).remote(), timeout=60)
    assert matches(selector, labels[found]), (selector, labels[found])
    fitting = [key for key, has in labels.items() if matches(selector, has)]
    assert len(fitting) == 1, (selector, fitting)
print("ok")
"""
    selectors = [
        {"pool": "big"},
        {"zone": "!in(a,b)"},  # the head has no zone at all
        {"zone": "!a", "pool": "!head"},
        {"pool": "in(small, none)"},
    ]
    command = [sys.executable, "-c", program, cluster.address, json.dumps(selectors)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=_with(cluster.environment)
    )
    assert done.stdout.strip().endswith("ok"), done.stderr[-2000:]


def test_rays_own_config_file_serves_the_same(
    cluster: LabelledCluster, tiny_model: Path, tmp_path: Path
) -> None:
    port = free_port()
    path = tmp_path / "ray.yaml"
    path.write_text(
        f"""\
proxy_location: HeadOnly
logging_config: {{log_level: WARNING, enable_access_log: false}}
http_options: {{host: 127.0.0.1, port: {port}}}
applications:
  - name: rays-own
    route_prefix: /
    import_path: polypath.deployments.app:app
    args:
      models:
        - model: {tiny_model}
          name: first
          pools:
            - {{name: small, num_cpus: 0.5, label_selector: {{pool: small}}}}
"""
    )
    serve = str(Path(sys.executable).with_name("serve"))
    command = [serve, "run", str(path), "--address", cluster.address]
    log = tmp_path / "serve.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=_with(cluster.environment)
        )
    try:
        paths = _await_paths(f"http://127.0.0.1:{port}/v1/paths", process, log)
        assert [(p["pool"], p["node"]["labels"]["pool"]) for p in paths] == [("small", "small")]
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=60)
        finally:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def fleet(cluster: LabelledCluster, file: Path) -> Iterator[RunningServer]:
    arguments = ["--config", str(file)]
    with serving_within(START_LIMIT_S, arguments, cluster.environment) as running:
        yield running


def test_every_worker_is_on_a_node_of_its_pool_and_says_so(fleet: RunningServer) -> None:
    data = fleet.get("/v1/paths")["data"]
    found = {(w["model"], w["pool"]): w["node"]["labels"]["pool"] for w in data}
    assert found == {
        ("first", "big"): "big",
        ("first", "small"): "small",
        ("second", "big"): "big",
    }
    assert len({worker["node"]["id"] for worker in data}) == 2


def test_each_pool_has_its_own_options_and_threads(fleet: RunningServer) -> None:
    plans = {(w["model"], w["pool"]): w["plan"] for w in fleet.get("/v1/paths")["data"]}
    big, small = plans["first", "big"], plans["first", "small"]
    assert (big["max_num_seqs"], small["max_num_seqs"]) == (2, 4)
    assert big["paths"]["decode"]["runner"] == "eager"
    assert {plan["num_threads"] for plan in plans.values()} == {1}


def test_every_worker_of_a_pool_was_started(fleet: RunningServer) -> None:
    started = [line for line in fleet.lines if line.startswith("  pool ")]
    assert sum("pool big of second, process" in line for line in started) == 2
    assert len(started) == 4


def test_all_models_are_listed_and_answer(fleet: RunningServer) -> None:
    models = {model["id"]: model for model in fleet.get("/v1/models")["data"]}
    assert list(models) == ["first", "second"]
    assert set(models["first"]["pools"]) == {"big", "small"}
    for name in models:
        body = {"model": name, "prompt": "a", "max_tokens": 3, "ignore_eos": True}
        answer = httpx.post(f"{fleet.url}/v1/completions", json=body, trust_env=False, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 3, answer.text


def test_metrics_and_paths_name_the_pool(fleet: RunningServer) -> None:
    metrics = httpx.get(f"{fleet.url}/metrics", trust_env=False, timeout=30).text
    for model, pool in (("first", "big"), ("first", "small"), ("second", "big")):
        assert f'polypath_worker_running{{model="{model}",pool="{pool}",worker=' in metrics
    code, output = run(["paths", "--url", fleet.url])
    assert code == 0 and "pool small" in output


def _await_paths(
    url: str, process: subprocess.Popen[bytes], log: Path
) -> list[dict[str, Any]]:  # JSON
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, f"no worker yet: {log.read_text()[-3000:]}"
        try:
            answer = httpx.get(url, trust_env=False, timeout=10)
            if answer.status_code == 200 and answer.json()["data"]:
                return answer.json()["data"]
        except httpx.HTTPError:
            pass
        time.sleep(0.5)


def _with(environment: dict[str, str]) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | environment
