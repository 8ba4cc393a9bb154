"""`pools: auto`: one pool for each kind of node, aimed at these nodes and no others."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from polypath.deployments.auto_pools import as_yaml, derive
from polypath.deployments.fleet import ModelSpec, PoolSpec
from polypath.deployments.nodes import Node
from polypath.deployments.placement import fits, place
from polypath.runtime.errors import ConfigurationError
from polypath.tests.unit.deployments.serve_files import GPU_NODE, coming, node, read, write

T4 = {"CPU": 4.0, "GPU": 1.0, "accelerator_type:T4": 1.0}
FILE = "models: [{model: /m, name: m, pools: auto, engine: {max_num_seqs: 8}}]"


def model(folder: Path, nodes: list[Node]) -> ModelSpec:
    return derive(read(folder, FILE).fleet, nodes).models[0]


def aims(pool: PoolSpec) -> tuple[str | None, dict[str, str]]:
    return pool.accelerator_type, pool.label_selector


def test_equal_nodes_are_one_pool_that_aims_at_nothing(tmp_path: Path) -> None:
    nodes = [node(f"n{n}", {"CPU": 16}) for n in range(3)]
    (pool,) = model(tmp_path, nodes).pools
    assert (pool.name, pool.num_workers, pool.num_cpus, pool.num_gpus) == ("cpu", 3, 15.75, 0)
    assert aims(pool) == (None, {})
    assert (pool.engine.device, pool.engine.max_num_seqs) == ("cpu", 8)


def test_a_mixed_fleet_has_a_pool_for_each_kind(tmp_path: Path) -> None:
    nodes = [
        node("head", {"CPU": 4}),
        node("h1", {"CPU": 64, "GPU": 8, "accelerator_type:H100": 1}),
        *(node(f"t{n}", T4) for n in range(2)),
        *(node(f"c{n}", {"CPU": 32}, {"zone": "a"}) for n in range(2)),
    ]
    found = {pool.name: pool for pool in model(tmp_path, nodes).pools}
    sizes = {name: (p.num_workers, p.num_cpus, p.num_gpus) for name, p in found.items()}
    assert sizes == {
        "cpu-4": (1, 3.75, 0),
        "h100": (8, 7.96, 1),
        "t4": (2, 3.75, 1),
        "cpu-32": (2, 31.75, 0),
    }
    assert aims(found["h100"]) == ("H100", {}) and aims(found["t4"]) == ("T4", {})
    assert aims(found["cpu-32"]) == (None, {"zone": "a"})
    assert aims(found["cpu-4"]) == (None, {"ray.io/node-id": "id-head"})
    assert found["h100"].engine.device == "cuda"


def test_each_pool_fits_its_own_nodes_only_and_all_find_room(tmp_path: Path) -> None:
    nodes = [
        node("a", {"CPU": 8}, {"pool": "x", "zone": "1"}),
        node("b", {"CPU": 8}, {"pool": "x", "zone": "2"}),
        node("c", {"CPU": 8}, {"pool": "y", "zone": "2"}),
        node("d", {"CPU": 8}),
        node("e", {"CPU": 8} | T4, {"pool": "x"}),
    ]
    fleet = derive(read(tmp_path, FILE).fleet, nodes)
    for pool in fleet.models[0].pools:
        assert sum(fits(pool, node) for node in nodes) == 1, pool
    place(fleet, nodes)
    names = [pool.name for pool in fleet.models[0].pools]
    assert names == ["x", "x-2", "y", "cpu-8", "x-3"]


@pytest.mark.parametrize("keys", [("pool", "zone", "arch"), ("zone", "arch", "pool")])
def test_the_order_in_which_ray_lists_labels_changes_nothing(
    tmp_path: Path, keys: tuple[str, ...]
) -> None:
    first, second = {"pool": "x", "zone": "1", "arch": "p"}, {"pool": "x", "zone": "2", "arch": "q"}
    nodes = [
        node("a", {"CPU": 8}, {key: first[key] for key in keys}),
        node("b", {"CPU": 8}, {key: second[key] for key in keys}),
        node("c", {"CPU": 8}, {"pool": "y", "zone": "3", "arch": "r"}),
    ]
    found = [aims(pool)[1] for pool in model(tmp_path, nodes).pools]
    assert found == [{"arch": "p"}, {"arch": "q"}, {"pool": "y"}]


def test_nodes_without_room_are_left_out(tmp_path: Path) -> None:
    nodes = [node("head", {"CPU": 0}), node("busy", {"CPU": 8}, free={"CPU": 0.3})]
    with pytest.raises(ConfigurationError, match=r"auto finds no node with room.*busy has 0\.3"):
        model(tmp_path, nodes)
    (pool,) = model(tmp_path, [*nodes, node("a", {"CPU": 2})]).pools
    assert (pool.num_workers, pool.num_cpus) == (1, 1.75)
    assert pool.label_selector == {"ray.io/node-id": "id-a"}


def test_types_that_may_come_are_no_nodes_yet(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="finds no node with room"):
        model(tmp_path, [coming("big", GPU_NODE, {}, 3)])


def test_what_was_derived_can_be_pasted_into_the_file(tmp_path: Path) -> None:
    nodes = [node("a", {"CPU": 8}, {"pool": "x"}), node("b", {"CPU": 16}), node("c", T4)]
    derived = model(tmp_path, nodes)
    content = {"models": [{"model": "/m", "name": "m", "engine": {"max_num_seqs": 8}}]}
    content["models"][0] |= yaml.safe_load(as_yaml(derived))
    again = read(tmp_path, write(tmp_path, yaml.safe_dump(content)).read_text()).fleet.models[0]
    stated = [(p.name, p.demand(), p.num_workers, aims(p), p.engine) for p in derived.pools]
    assert [(p.name, p.demand(), p.num_workers, aims(p), p.engine) for p in again.pools] == stated
