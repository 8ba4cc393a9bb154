"""Nodes as Ray lists them, and the types of a launcher's file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from polypath.deployments.nodes import autoscaler_file, node_types, this_machine
from polypath.runtime.errors import ConfigurationError
from polypath.tests.unit.deployments.serve_files import GPU_NODE, node

ROOT = Path(__file__).resolve().parents[3]


def test_our_own_cluster_yaml_gives_its_types() -> None:
    types = {found.name: found for found in node_types(ROOT / "cluster.yaml")}
    assert {name: found.count for name, found in types.items()} == {
        "head": 1,
        "cpu": 2,
        "t4": 2,
        "l4": 2,
    }
    assert types["t4"].labels == {"pool": "t4"} and types["t4"].accelerators == ("T4",)
    assert types["l4"].has("GPU") == 1 and not types["l4"].has("accelerator_type:T4")
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


def test_the_autoscaler_of_this_ray_and_no_other_is_asked(tmp_path: Path) -> None:
    """A process that looks like Ray's monitor, as `ray start --autoscaling-config` starts it."""
    script = tmp_path / "autoscaler" / "_private" / "monitor.py"
    script.parent.mkdir(parents=True)
    script.write_text("print('up', flush=True)\ninput()")
    gcs, file = "10.9.8.7:6379", ROOT / "cluster.yaml"
    options = [f"--gcs-address={gcs}", f"--autoscaling-config={file}"]
    pipe = subprocess.PIPE
    command = [sys.executable, str(script), *options]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        assert autoscaler_file(gcs) == file
        assert autoscaler_file("10.9.8.7:6380") is None
        process.communicate("\n", timeout=30)


def test_a_node_knows_its_cards_and_the_labels_that_people_gave_it() -> None:
    found = node("a", GPU_NODE, {"pool": "gpu"})
    assert found.accelerators == ("H100",) and found.own_labels == {"pool": "gpu"}
    assert found.has("accelerator_type:H100") and not found.has("accelerator_type:T4")
    assert this_machine(2).total == {"CPU": 2} and this_machine(2, 1).total["GPU"] == 1
