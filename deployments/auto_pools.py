"""`pools: auto`: one pool for each kind of node that Ray sees."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, count

import yaml

from ..runtime.errors import ConfigurationError
from .fleet import FleetSpec, ModelSpec, PoolSpec
from .nodes import NODE_ID, Node
from .placement import LEAST_CPUS

Group = list[Node]
MAX_GPUS = 64


def derive(fleet: FleetSpec, nodes: Sequence[Node]) -> FleetSpec:
    """The fleet with pools for models that left them to the nodes. Raises ConfigurationError where
    no node has room for a worker.
    """
    models = tuple(
        replace(model, pools=tuple(_pools(fleet, model, nodes))) if model.auto_pools else model
        for model in fleet.models
    )
    return replace(fleet, models=models)


def as_yaml(model: ModelSpec) -> str:
    """Pools as they would stand in the file, to be pasted there and changed."""
    entries = []
    for pool in model.pools:
        entry: dict[str, object] = {"name": pool.name, "num_cpus": pool.num_cpus}
        optional = {
            "num_gpus": pool.num_gpus,
            "accelerator_type": pool.accelerator_type,
            "label_selector": dict(pool.label_selector),
            "min_workers": pool.num_workers if pool.num_workers > 1 else None,
        }
        entries.append(entry | {key: value for key, value in optional.items() if value})
    return yaml.safe_dump({"pools": entries}, sort_keys=False, width=200)


def _pools(fleet: FleetSpec, model: ModelSpec, nodes: Sequence[Node]) -> Iterator[PoolSpec]:
    groups = _groups(fleet, [node for node in nodes if node.is_there])
    if not groups:
        listed = "; ".join(f"{n.name} has {n.free.get('CPU', 0):g} CPUs free" for n in nodes)
        raise ConfigurationError(
            f"pools: auto finds no node with room for a worker: {listed or 'there is no node'}"
        )
    names: set[str] = set()
    for group in groups:
        others = [node for node in nodes if all(node is not member for member in group)]
        name = _name(group, others, names)
        names.add(name)
        yield _pool(fleet, model, group, others, name)


def _groups(fleet: FleetSpec, nodes: Sequence[Node]) -> list[Group]:
    """Nodes with equal cards, CPUs and labels of their own; nodes without room are left out."""
    groups: dict[object, Group] = {}
    for node in nodes:
        if _cpus_each(fleet, [node]) < LEAST_CPUS:
            continue
        labels = tuple(sorted(node.own_labels.items()))
        kind = (node.accelerators, node.total.get("GPU", 0.0), node.total.get("CPU", 0.0), labels)
        groups.setdefault(kind, []).append(node)
    return list(groups.values())


def _pool(
    fleet: FleetSpec, model: ModelSpec, group: Group, others: Sequence[Node], name: str
) -> PoolSpec:
    num_gpus = _free_gpus(group)
    device = model.engine.device
    if device == "auto":
        device = "cuda" if num_gpus else "cpu"
    accelerator, selector = _aim(group, others, bool(num_gpus))
    return PoolSpec(
        name=name,
        engine=replace(model.engine, device=device),
        num_workers=len(group) * max(1, num_gpus),
        num_cpus=_cpus_each(fleet, group),
        num_gpus=1.0 if num_gpus else 0.0,
        accelerator_type=accelerator,
        label_selector=selector,
        where=model.where,
    )


def _free_gpus(group: Group) -> int:
    """Whole GPUs free on every node of the group: a worker for each."""
    return min(MAX_GPUS, min(int(node.free.get("GPU", 0.0)) for node in group))


def _cpus_each(fleet: FleetSpec, group: Group) -> float:
    """CPUs of each worker. The gateway's are left on every node, since it may land on any; threads
    are rounded up, so that this costs none.
    """
    free = min(node.free.get("CPU", 0.0) for node in group) - fleet.gateway_cpus
    return math.floor(free / max(1, _free_gpus(group)) * 100) / 100


def _aim(group: Group, others: Sequence[Node], has_gpus: bool) -> tuple[str | None, dict[str, str]]:
    """(accelerator type, label selector) that fit this group's nodes and no others: nothing where
    there are no others, then the kind of card, then labels, then the nodes' own ids.
    """
    if not others:
        return None, {}
    kinds = group[0].accelerators
    if has_gpus and kinds and not any(set(kinds) & set(node.accelerators) for node in others):
        return kinds[0], {}
    labels = group[0].own_labels
    # Ray gives labels in no order; the one that names the pool aims at it where it can.
    for key, value in sorted(labels.items(), key=lambda label: (label[0] != "pool", label)):
        if all(node.labels.get(key) != value for node in others):
            return None, {key: value}
    if labels and not any(labels.items() <= node.labels.items() for node in others):
        return None, dict(sorted(labels.items()))
    ids = [node.id for node in group]
    return None, {NODE_ID: ids[0] if len(ids) == 1 else f"in({','.join(ids)})"}


def _name(group: Group, others: Sequence[Node], taken: set[str]) -> str:
    """After the label `pool`, the card, or the CPUs; numbered where that is not enough."""
    node = group[0]
    kind = node.accelerators[0].lower() if node.accelerators else "gpu"
    sized = f"cpu-{node.total.get('CPU', 0):g}" if others else "cpu"
    name = node.labels.get("pool") or (kind if node.total.get("GPU") else sized)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._") or "pool"
    numbered = (f"{name}-{number}" for number in count(2))
    return next(found for found in chain([name], numbered) if found not in taken)
