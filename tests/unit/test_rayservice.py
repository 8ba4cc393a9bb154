"""examples/rayservice.yaml: Serve's own schema reads its applications, ours its pools, an extract
of KubeRay's CRD the rest; every pool finds a group of pods that it fits.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from polypath.deployments.autoscaling_serve import POLICY
from polypath.deployments.nodes import Node
from polypath.deployments.placement import place
from polypath.deployments.serve_config import fleet_from_args
from polypath.tests.unit.kuberay_schema import RAY_SERVICE

ROOT = Path(__file__).resolve().parents[2]
Document = dict[str, Any]  # YAML: whatever it holds


@pytest.fixture
def service() -> Document:
    return yaml.safe_load((ROOT / "examples" / "rayservice.yaml").read_text())


@pytest.fixture
def application(service: Document) -> Document:
    (found,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    return found


def groups(service: Document) -> list[Document]:
    cluster = service["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def container(group: Document) -> Document:
    (found,) = group["template"]["spec"]["containers"]
    return found


def node(group: Document) -> Node:
    """A group of pods as the nodes that it may become."""
    limits = container(group)["resources"]["limits"]
    cpus = group["rayStartParams"].get("num-cpus", limits["cpu"])
    total = {"CPU": float(cpus), "GPU": float(limits.get("nvidia.com/gpu", 0))}
    return Node(
        name=group.get("groupName", "head"),
        total=total,
        labels=dict(group["labels"]),
        count=group.get("maxReplicas", 1),
        is_there=False,
    )


def test_is_what_the_crd_takes(service: Document) -> None:
    jsonschema.validate(service, RAY_SERVICE)


@pytest.mark.parametrize(
    "path",
    [
        ("spec", "rayClusterConfig", "headGroupSpec", "rayStartParams", "num-cpus"),
        ("spec", "rayClusterConfig", "workerGroupSpecs", 0, "minReplicas"),
        ("spec", "rayClusterConfig", "authOptions", "mode"),
    ],
)
def test_the_extract_sees_a_value_of_the_wrong_type(service: Document, path: Any) -> None:
    wrong = copy.deepcopy(service)
    inner: Any = wrong
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = [1]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, RAY_SERVICE)


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on")  # Ray's own schema
def test_serves_schema_reads_the_applications(service: Document) -> None:
    from ray.serve.schema import ServeDeploySchema

    content = yaml.safe_load(service["spec"]["serveConfigV2"])
    schema = ServeDeploySchema.model_validate(content)
    assert schema.http_options.port == 8000


def test_names_our_policy(application: Document) -> None:
    assert application["autoscaling_policy"] == {"policy_function": POLICY}


def test_every_pool_finds_pods_that_hold_its_workers(
    service: Document, application: Document
) -> None:
    nodes = [node(group) for group in groups(service)]
    fleet = place(fleet_from_args(application["args"]), nodes)
    assert {pool.name: pool.most_workers for _, pool in fleet.pools()} == {
        found.name: found.count for found in nodes[1:]
    }


def test_pods_with_a_card_have_the_image_for_it_and_all_share_the_models(service: Document) -> None:
    for group in groups(service):
        has_card = "nvidia.com/gpu" in container(group)["resources"]["limits"]
        assert container(group)["image"].endswith(":gpu" if has_card else ":cpu")
        mounts = [mount["name"] for mount in container(group)["volumeMounts"]]
        assert mounts == [volume["name"] for volume in group["template"]["spec"]["volumes"]]


def test_the_cluster_asks_for_its_token(service: Document) -> None:
    assert service["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}
