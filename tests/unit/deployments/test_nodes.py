"""Nodes as Ray lists them, and the types of a launcher's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from polypath.deployments.nodes import node_types, this_machine
from polypath.runtime.errors import ConfigurationError
from polypath.tests.unit.deployments.serve_files import GPU_NODE, node

ROOT = Path(__file__).resolve().parents[3]


def test_our_own_cluster_yaml_gives_its_types() -> None:
    types = {found.name: found for found in node_types(ROOT / "cluster.yaml")}
    assert {name: found.count for name, found in types.items()} == {"head": 1, "cpu": 2, "gpu": 2}
    assert types["gpu"].labels == {"pool": "gpu"} and types["gpu"].total == {"CPU": 8, "GPU": 1}
    assert not any(found.is_there for found in types.values())


@pytest.mark.parametrize(
    "text", ["[]", "a: 1", "available_node_types: 3", "available_node_types: {x: 3}", "{"]
)
def test_another_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"c\.yaml is no file of Ray's cluster launcher"):
        node_types(path)
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        node_types(tmp_path / "none.yaml")


def test_a_node_knows_its_cards_and_the_labels_that_people_gave_it() -> None:
    found = node("a", GPU_NODE, {"pool": "gpu"})
    assert found.accelerators == ("H100",) and found.own_labels == {"pool": "gpu"}
    assert found.has("accelerator_type:H100") and not found.has("accelerator_type:T4")
    assert this_machine(2).total == {"CPU": 2} and this_machine(2, 1).total["GPU"] == 1
