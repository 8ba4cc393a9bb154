"""docs/pools.md: its examples are valid, and its tables are the schema's own words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from polypath.deployments.nodes import Node
from polypath.deployments.placement import place
from polypath.deployments.serve_check import check_cluster
from polypath.deployments.serve_config import fleet_from_args, read_serve_file
from polypath.deployments.serve_schema import (
    EngineEntry,
    Entry,
    GatewayEntry,
    ModelEntry,
    PoolEntry,
    ScalingEntry,
    ServeEntry,
)
from polypath.tests.unit.deployments.serve_files import node

PAGE = (Path(__file__).parents[3] / "docs" / "pools.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
H100: dict[str, float] = {"CPU": 16, "GPU": 2, "accelerator_type:H100": 1}
T4: dict[str, float] = {"CPU": 4, "GPU": 1, "accelerator_type:T4": 1}


def mixed_fleet() -> list[Node]:
    """A head, one machine with two H100s, four with a T4, one with many cores."""
    return [
        node("head", {"CPU": 2}),
        node("h", H100),
        *(node(f"t{n}", T4) for n in range(4)),
        node("c", {"CPU": 64}, {"pool": "cpu"}),
    ]


def test_the_mixed_fleet_finds_its_nodes(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(EXAMPLES[0])
    found = read_serve_file(path)
    checked = check_cluster(found.fleet, mixed_fleet(), is_head_here=False)
    names = [(model.name, pool.name) for model, pool in checked.fleet.pools()]
    assert names == [(n, p) for n in ("qwen3-8b",) for p in ("h100", "t4", "cpu")] + [
        ("smollm2", "cpu")
    ]
    assert found.fleet.models[0].rules.prefer == ("h100", "t4")
    lengths = [pool.engine.max_model_len for pool in found.fleet.models[0].pools]
    assert lengths == [8192, 4096, 8192]


def test_the_example_of_auto_has_a_pool_for_each_kind(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(EXAMPLES[1])
    checked = check_cluster(read_serve_file(path).fleet, mixed_fleet(), is_head_here=False)
    names = [pool.name for pool in checked.fleet.models[0].pools]
    assert names == ["cpu-2", "h100", "t4", "cpu"]


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on")  # Ray's own schema
def test_the_example_of_rays_own_file_is_one(tmp_path: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    content: dict[str, Any] = yaml.safe_load(EXAMPLES[2])
    ServeDeploySchema.model_validate(content)
    place(fleet_from_args(content["applications"][0]["args"]), mixed_fleet())


@pytest.mark.parametrize(
    "entry", [ServeEntry, GatewayEntry, ModelEntry, ScalingEntry, PoolEntry, EngineEntry]
)
def test_every_key_is_on_the_page_as_the_schema_describes_it(entry: type[Entry]) -> None:
    rows = [f"| `{name}` | {field.description} |" for name, field in entry.model_fields.items()]
    assert [row for row in rows if row not in PAGE] == []
