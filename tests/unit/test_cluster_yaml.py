"""`cluster.yaml` and the examples for other providers are what Ray's cluster launcher accepts by
its schema and its own preparation without a network; they install the files that they copy.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CLOUDS = ["cluster.yaml", "examples/gcp.yaml"]
FILES = [*CLOUDS, "examples/local.yaml"]
Cluster = dict[str, Any]  # YAML: whatever it holds


def read(name: str) -> Cluster:
    return yaml.safe_load((ROOT / name).read_text())


@pytest.fixture(params=FILES)
def cluster(request: pytest.FixtureRequest) -> Cluster:
    return read(request.param)


@pytest.fixture(params=CLOUDS)
def cloud(request: pytest.FixtureRequest) -> Cluster:
    return read(request.param)


def ray_schema() -> dict[str, Any]:  # a JSON schema
    spec = importlib.util.find_spec("ray")
    assert spec is not None and spec.origin is not None
    return json.loads((Path(spec.origin).parent / "autoscaler" / "ray-schema.json").read_text())


def setup_commands(cluster: Cluster) -> list[str]:
    """Every setup command of the file, those of single node types included."""
    groups = [cluster["setup_commands"], cluster.get("head_setup_commands", [])]
    types = cluster.get("available_node_types", {})
    groups += [node.get("worker_setup_commands", []) for node in types.values()]
    return [command for group in groups for command in group]


def start_commands(cluster: Cluster) -> list[str]:
    return [*cluster["head_start_ray_commands"], *cluster["worker_start_ray_commands"]]


def test_validates_against_rays_own_schema(cluster: Cluster) -> None:
    jsonschema.validate(cluster, ray_schema())


@pytest.mark.parametrize("name", FILES)
def test_the_launcher_prepares_it_without_a_network(name: str) -> None:
    """As `ray up` does before it asks the provider: defaults, bounds of node types, checks."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(copy.deepcopy(read(name)))
    validate_config(prepared)
    types = prepared["available_node_types"]
    assert prepared["head_node_type"] in types
    assert all("max_workers" in node for node in types.values())
    assert prepare_config(copy.deepcopy(prepared))["available_node_types"] == types


def test_the_launcher_takes_nobodys_word_for_the_kinds_of_our_own_machines() -> None:
    """Why examples/local.yaml labels nodes by their start command."""
    from ray.autoscaler._private.util import prepare_config

    (kind,) = prepare_config(read("examples/local.yaml"))["available_node_types"].values()
    assert (kind["min_workers"], kind["max_workers"]) == (3, 3)
    wrong = read("examples/local.yaml") | {"available_node_types": {"a": {"node_config": {}}}}
    with pytest.raises(BaseException, match="not supported"):  # the launcher's own way to give up
        prepare_config(wrong)


def test_has_a_cpu_head_cpu_workers_and_two_kinds_of_cards(cloud: Cluster) -> None:
    nodes = cloud["available_node_types"]
    head = nodes.pop(cloud["head_node_type"])
    assert not head["resources"].get("GPU")
    assert sorted(bool(node["resources"].get("GPU")) for node in nodes.values()) == [
        False,
        True,
        True,
    ]
    cards = [k for node in nodes.values() for k in node["resources"] if k.startswith("acc")]
    assert len(set(cards)) == 2, "so that the autoscaler knows which card a pool asks for"


def test_no_more_workers_than_the_cluster_allows(cloud: Cluster) -> None:
    nodes = cloud["available_node_types"].values()
    assert sum(node.get("min_workers", 0) for node in nodes) <= cloud["max_workers"]
    assert sum(node.get("max_workers", 0) for node in nodes) <= cloud["max_workers"]


def test_every_node_type_has_its_own_pool_label_and_an_image(cloud: Cluster) -> None:
    nodes = cloud["available_node_types"].values()
    pools = [node["labels"]["pool"] for node in nodes]
    assert len(set(pools)) == len(pools)
    for node in nodes:
        config = node["node_config"]
        assert "ImageId" in config or "sourceImage" in json.dumps(config["disks"])


def test_nodes_that_the_provider_cannot_label_label_themselves() -> None:
    for command in start_commands(read("examples/local.yaml")):
        assert "ray start" not in command or "polypath probe --ray-labels" in command


def test_copies_every_file_that_its_commands_install(cluster: Cluster) -> None:
    words = [word.strip(";") for command in setup_commands(cluster) for word in command.split()]
    named = {word for word in words if word.endswith((".txt", ".whl"))}
    assert named, "the setup commands install nothing"
    assert all(word.startswith(tuple(cluster["file_mounts"])) for word in named)
    local = [Path(path) for path in cluster["file_mounts"].values() if not path.startswith("~")]
    missing = [path for path in local if path.name != "dist" and not (ROOT / path).is_file()]
    assert not missing


def test_every_node_holds_the_token_and_starts_ray_with_it(cluster: Cluster) -> None:
    assert cluster["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    starts = [command for command in start_commands(cluster) if "ray start" in command]
    assert len(starts) == 2
    assert all("RAY_AUTH_MODE=token" in command for command in starts)
    assert "proxy.middlewares" in starts[0], "headers are cleaned before Serve's proxy sees them"


def test_bash_can_read_every_command(cluster: Cluster) -> None:
    for command in [*setup_commands(cluster), *start_commands(cluster)]:
        done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stderr)
