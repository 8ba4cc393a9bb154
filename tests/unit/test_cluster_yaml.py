"""`cluster.yaml` is what Ray's cluster launcher accepts, and installs the files that it copies."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cluster() -> dict[str, Any]:  # YAML: whatever it holds
    return yaml.safe_load((ROOT / "cluster.yaml").read_text())


def ray_schema() -> dict[str, Any]:  # a JSON schema
    spec = importlib.util.find_spec("ray")
    assert spec is not None and spec.origin is not None
    return json.loads((Path(spec.origin).parent / "autoscaler" / "ray-schema.json").read_text())


def commands(cluster: dict[str, Any]) -> list[str]:
    """Every setup command of the file, those of single node types included."""
    groups = [cluster["setup_commands"], cluster["head_setup_commands"]]
    groups += [
        node.get("worker_setup_commands", []) for node in cluster["available_node_types"].values()
    ]
    return [command for group in groups for command in group]


def test_validates_against_rays_own_schema(cluster: dict[str, Any]) -> None:
    jsonschema.validate(cluster, ray_schema())


def test_has_a_cpu_head_and_both_kinds_of_workers(cluster: dict[str, Any]) -> None:
    nodes = cluster["available_node_types"]
    head = nodes.pop(cluster["head_node_type"])
    assert not head["resources"].get("GPU")
    assert sorted(bool(node["resources"].get("GPU")) for node in nodes.values()) == [False, True]


def test_no_more_workers_than_the_cluster_allows(cluster: dict[str, Any]) -> None:
    nodes = cluster["available_node_types"].values()
    assert sum(node.get("min_workers", 0) for node in nodes) <= cluster["max_workers"]
    assert sum(node.get("max_workers", 0) for node in nodes) <= cluster["max_workers"]


def test_every_node_type_has_its_own_pool_label(cluster: dict[str, Any]) -> None:
    pools = [node["labels"]["pool"] for node in cluster["available_node_types"].values()]
    assert len(set(pools)) == len(pools)


def test_copies_every_file_that_its_commands_install(cluster: dict[str, Any]) -> None:
    words = [word for command in commands(cluster) for word in command.split()]
    named = {word for word in words if word.endswith((".txt", ".whl"))}
    assert named, "the setup commands install nothing"
    assert all(word.startswith(tuple(cluster["file_mounts"])) for word in named)
    local = [Path(path) for path in cluster["file_mounts"].values() if not path.startswith("~")]
    missing = [path for path in local if path.name != "dist" and not (ROOT / path).is_file()]
    assert not missing
