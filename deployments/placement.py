"""Whether every pool finds its nodes, before Ray is asked: Ray itself would wait without a word."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..runtime.errors import ConfigurationError
from .fleet import FleetSpec, ModelSpec, PoolSpec, pool_title
from .label_selector import matches
from .nodes import Node
from .packing import Item, Room, pack
from .placement_faults import no_fit, no_room

LEAST_CPUS = 0.25  # less than this on every node is no place for a worker


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A pool whose nodes are known."""

    model: ModelSpec
    pool: PoolSpec
    fitting: tuple[Node, ...]


def place(fleet: FleetSpec, nodes: Sequence[Node]) -> FleetSpec:
    """The fleet with the CPUs of every worker filled in.

    Raises ConfigurationError with a sentence for each pool that fits no node of its own, and for
    the first one that finds no room beside the others.
    """
    places, faults = [], []
    for model, pool in fleet.pools():
        title = pool_title(fleet, model, pool)
        fault = no_fit(title, pool, nodes)
        if fault is not None:
            faults.append(f"{pool.where}: {fault}" if pool.where else fault)
        fitting = tuple(node for node in nodes if fits(pool, node))
        places.append(Place(model=model, pool=pool, fitting=fitting))
    if faults:
        raise ConfigurationError("\n".join(faults))
    filled = _fill(fleet, places, nodes)
    _require_room(fleet, filled, nodes)
    return _with_pools(fleet, filled)


def fits(pool: PoolSpec, node: Node) -> bool:
    """Whether a node, were it idle, could run one worker of the pool."""
    wanted = pool.demand()
    return matches(pool.label_selector, node.labels) and all(
        node.has(name) >= amount for name, amount in wanted.items()
    )


def _fill(fleet: FleetSpec, places: list[Place], nodes: Sequence[Node]) -> list[Place]:
    """Give pools without num_cpus the CPUs that are free once all others, and the gateway, have
    theirs.
    """
    fixed = [item for place in places if place.pool.num_cpus is not None for item in _items(place)]
    left = pack(fixed, _rooms(nodes)).left
    filled = []
    for place in places:
        if place.pool.num_cpus is None:
            cpus = _share(fleet, place, left)
            place = replace(place, pool=replace(place.pool, num_cpus=cpus))
            left = pack(_items(place), left).left
        filled.append(place)
    return filled


def _share(fleet: FleetSpec, place: Place, left: list[Room]) -> float:
    """CPUs of each worker of a pool that takes whole nodes, or with each GPU its part of a node:
    those of the smallest of the `num_workers` largest parts, since all workers of a pool are equal.
    """
    parts: list[float] = []
    for room in left:
        if fits(place.pool, room.node):
            gpus = place.pool.num_gpus
            number = int(room.free.get("GPU", 0.0) / gpus) if gpus else 1
            free = room.free.get("CPU", 0.0) - fleet.gateway_cpus
            parts += [free / number] * number
    wanted = max(1, place.pool.num_workers)  # one that sleeps needs a place to wake up in
    parts = sorted(parts, reverse=True)[:wanted]
    parts = [math.floor(part * 100) / 100 for part in parts if part >= LEAST_CPUS]
    if len(parts) < wanted:
        title = pool_title(fleet, place.model, place.pool)
        sentence = no_room(title, place.pool, place.fitting, len(parts))
        raise ConfigurationError(_prefixed(place, sentence))
    return parts[-1]


def _require_room(fleet: FleetSpec, places: list[Place], nodes: Sequence[Node]) -> None:
    """Raise when workers and gateway do not all find room beside what runs there already."""
    items = [item for place in places for item in _items(place)]
    gateway = Item(pool=None, demand={"CPU": fleet.gateway_cpus}, fits=lambda _: True)
    result = pack([*items, gateway], _rooms(nodes))
    if result.missing is None:
        return
    if result.missing.pool is None:
        raise ConfigurationError(
            f"the gateway finds no {fleet.gateway_cpus:g} CPUs beside the workers; lower num_cpus "
            "of a pool, or gateway.num_cpus"
        )
    place = next(place for place in places if place.pool is result.missing.pool)
    title = pool_title(fleet, place.model, place.pool)
    raise ConfigurationError(
        _prefixed(place, no_room(title, place.pool, place.fitting, result.num_placed))
    )


def _items(place: Place) -> list[Item]:
    pool = place.pool
    item = Item(pool=pool, demand=pool.demand(), fits=lambda node: fits(pool, node))
    return [item] * max(1, pool.num_workers)


def _rooms(nodes: Sequence[Node]) -> list[Room]:
    """What is free now, and every node that may come, up to a number nobody will need."""
    rooms = []
    for node in nodes:
        count = 1 if node.is_there else min(node.count, 64)
        free = node.free if node.is_there else node.total
        rooms += [Room(node=node, free=dict(free)) for _ in range(count)]
    return rooms


def _prefixed(place: Place, sentence: str) -> str:
    return f"{place.pool.where}: {sentence}" if place.pool.where else sentence


def _with_pools(fleet: FleetSpec, places: list[Place]) -> FleetSpec:
    models = []
    for model in fleet.models:
        pools = tuple(place.pool for place in places if place.model is model)
        models.append(replace(model, pools=pools))
    return replace(fleet, models=tuple(models))
