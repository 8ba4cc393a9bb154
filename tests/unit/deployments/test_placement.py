"""Pools against fake nodes: who fits, who does not and why, and what CPUs a worker gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from polypath.deployments.fleet import FleetSpec, plain_fleet
from polypath.deployments.nodes import Node, this_machine
from polypath.deployments.placement import place
from polypath.runtime.config import EngineConfig
from polypath.runtime.errors import ConfigurationError
from polypath.tests.unit.deployments.serve_files import GPU_NODE, coming, node, read

HEAD = node("head", {"CPU": 4}, {"pool": "head"})
CPU = node("cpu-1", {"CPU": 16, "slots": 2}, {"pool": "cpu", "zone": "a"})
GPU = node("gpu-1", GPU_NODE, {"pool": "gpu", "zone": "b"})
NODES = [HEAD, CPU, GPU]


def fleet(folder: Path, *pools: str) -> FleetSpec:
    listed = ", ".join(f"{{name: p{n}, {pool}}}" for n, pool in enumerate(pools))
    return read(folder, f"models: [{{name: m, pools: [{listed}]}}]").fleet


def refused(fleet: FleetSpec, nodes: list[Node]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        place(fleet, nodes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        ("label_selector: {pol: cpu}", "no node has a label pol; did you mean pool?"),
        ("label_selector: {color: red}", "no node has a label color; labels there are pool, zone"),
        (
            "label_selector: {pool: cpuu}",
            "has pool=cpuu; did you mean cpu? values there are cpu, g",
        ),
        ("label_selector: {zone: 'in(x,y)'}", "has zone=in(x,y); values there are a, b"),
        ("label_selector: {pool: cpu, zone: b}", "no node has all of pool: cpu, zone: b together"),
        (
            "label_selector: {pool: '!in(head,cpu,gpu)'}",
            "leaves no node: all have pool=cpu, gpu, h",
        ),
        ("num_gpus: 1, accelerator_type: H10", "accelerator_type H10; did you mean H100?"),
        ("num_cpus: 17", "takes 17 CPUs, and no node that fits its other wishes has more than 16"),
        ("num_cpus: 9, num_gpus: 1", "no node has 9 CPUs, 1 GPUs together; head has 4 CPUs in all"),
        ("num_gpus: 1, label_selector: {pool: cpu}", "and no node that fits has a GPU"),
        ("resources: {slot: 1}", "no node that fits has a resource slot; did you mean slots?"),
        ("resources: {slots: 3}", "takes 3 slots, and no node that fits its other wishes has more"),
    ],
)
def test_a_pool_that_fits_no_node_is_told_what_is_nearest(
    tmp_path: Path, pool: str, expected: str
) -> None:
    sentence = refused(fleet(tmp_path, pool), NODES)
    assert sentence.startswith("serve.yaml, line 1: pool p0: ")
    assert expected in sentence and "\n" not in sentence


def test_each_pool_without_a_node_has_its_own_line(tmp_path: Path) -> None:
    wishes = fleet(tmp_path, "num_cpus: 99", "num_cpus: 1", "num_gpus: 1, num_cpus: 99")
    assert len(refused(wishes, NODES).splitlines()) == 2


def test_a_node_type_that_may_come_is_as_good_as_a_node(tmp_path: Path) -> None:
    wishes = fleet(tmp_path, "num_cpus: 32, num_gpus: 1, label_selector: {pool: big}")
    big = coming("big", {"CPU": 64, "GPU": 8}, {"pool": "big"}, 2)
    assert place(wishes, [*NODES, big]).models[0].pools[0].num_cpus == 32
    sentence = refused(fleet(tmp_path, "label_selector: {pool: bigg}"), [*NODES, big])
    assert "no node, now or to come, has pool=bigg; did you mean big?" in sentence


def test_a_type_that_names_no_card_may_have_any(tmp_path: Path) -> None:
    wishes = fleet(tmp_path, "num_gpus: 1, num_cpus: 4, accelerator_type: L4")
    place(wishes, [HEAD, coming("g6", {"CPU": 8, "GPU": 1}, {}, 1)])
    assert "there are H100" in refused(wishes, NODES)


def test_more_workers_than_there_is_room_for_are_counted(tmp_path: Path) -> None:
    sentence = refused(fleet(tmp_path, "num_cpus: 6, min_workers: 4"), NODES)
    assert "pool p0: there is room for 3 of its 4 workers" in sentence
    assert "cpu-1 has 16 CPUs, 2 slots free" in sentence


def test_what_runs_there_already_counts(tmp_path: Path) -> None:
    busy = node("cpu-1", {"CPU": 16}, free={"CPU": 1.5})
    wishes = fleet(tmp_path, "num_cpus: 2")
    assert "cpu-1 has 1.5 CPUs free" in refused(wishes, [busy])
    place(wishes, [busy, HEAD])


def test_pools_are_packed_together_whatever_their_order(tmp_path: Path) -> None:
    """The picky pool must get the only node that it fits, though another is named first."""
    anywhere, picky = "num_cpus: 12", "num_cpus: 12, label_selector: {pool: cpu}"
    other = node("cpu-2", {"CPU": 16}, {"pool": "spare"})
    for pools in ((anywhere, picky), (picky, anywhere)):
        place(fleet(tmp_path, *pools), [CPU, other])
        assert "there is no room for it beside" in refused(fleet(tmp_path, *pools), [CPU])


def test_a_puzzle_that_greed_would_fail_is_solved(tmp_path: Path) -> None:
    nodes = [node("a", {"CPU": 10.25}), node("b", {"CPU": 10})]
    placed = place(fleet(tmp_path, *(f"num_cpus: {n}" for n in (6, 5, 5, 4))), nodes)
    assert [pool.num_cpus for pool in placed.models[0].pools] == [6, 5, 5, 4]
    refused(fleet(tmp_path, *(f"num_cpus: {n}" for n in (6, 5, 5, 5))), nodes)


def test_the_gateway_needs_its_place_too(tmp_path: Path) -> None:
    sentence = refused(fleet(tmp_path, "num_cpus: 4"), [HEAD])
    assert "the gateway finds no 0.25 CPUs beside the workers" in sentence


def test_without_a_number_a_worker_takes_what_its_node_has_free(tmp_path: Path) -> None:
    pools = place(fleet(tmp_path, "label_selector: {pool: cpu}"), NODES).models[0].pools
    assert pools[0].num_cpus == 15.75
    shared = place(fleet(tmp_path, "label_selector: {pool: cpu}", "num_cpus: 6"), [CPU])
    assert shared.models[0].pools[0].num_cpus == 9.75
    two = place(fleet(tmp_path, "min_workers: 2"), [CPU, HEAD]).models[0].pools[0]
    assert two.num_cpus == 3.75  # of the smaller one: a pool has one size
    sentence = refused(fleet(tmp_path, "min_workers: 3"), [CPU, HEAD])
    assert "room for 2 of its 3 workers" in sentence


def test_workers_with_a_gpu_share_the_cpus_of_a_node_by_its_gpus(tmp_path: Path) -> None:
    big = node("big", {"CPU": 64.25, "GPU": 8.0})
    (pool,) = place(fleet(tmp_path, "num_gpus: 1, min_workers: 8"), [big]).models[0].pools
    assert pool.num_cpus == 8
    (pool,) = (
        place(fleet(tmp_path, "num_gpus: 0.5, min_workers: 3, engine: {kv_bytes: 1GiB}"), [big])
        .models[0]
        .pools
    )
    assert pool.num_cpus == 4


def test_the_command_lines_one_worker_goes_where_most_cpus_are_free() -> None:
    plain = plain_fleet(EngineConfig(model="m"))
    assert place(plain, NODES).models[0].pools[0].num_cpus == 15.75
    assert place(plain, [this_machine(2)]).models[0].pools[0].num_cpus == 1.75
    full = node("a", {"CPU": 8}, free={"CPU": 0.25})
    sentence = refused(plain, [full])
    assert sentence.startswith("the worker: there is no room for it") and "0.25 CPUs" in sentence


def test_an_own_ray_has_this_machine_alone(tmp_path: Path) -> None:
    sentence = refused(fleet(tmp_path, "label_selector: {pool: gpu}"), [this_machine(2)])
    assert "no node has a label pool; none has labels" in sentence
    assert "a Ray of its own has this machine alone; address names a cluster" in sentence


def test_a_huge_fleet_is_answered_at_once(tmp_path: Path) -> None:
    nodes = [node(f"n{n}", {"CPU": 8}) for n in range(40)]
    mixed = fleet(tmp_path, "num_cpus: 3, min_workers: 60", "num_cpus: 1, min_workers: 30")
    assert [pool.num_workers for pool in place(mixed, nodes).models[0].pools] == [60, 30]
    sentence = refused(fleet(tmp_path, "num_cpus: 1, min_workers: 2000"), nodes)
    assert "room for 320 of its 2000 workers" in sentence


def test_a_pool_that_sleeps_needs_a_place_for_one_worker(tmp_path: Path) -> None:
    found = place(fleet(tmp_path, "min_workers: 0, max_workers: 3"), [CPU, HEAD]).models[0].pools[0]
    assert found.num_cpus is not None and found.num_cpus > 1 and found.workers_text == "0 to 3"
    sentence = refused(fleet(tmp_path, "num_cpus: 99, min_workers: 0, max_workers: 3"), NODES)
    assert "99" in sentence
