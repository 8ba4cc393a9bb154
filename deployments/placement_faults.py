"""Why a pool finds no node: one sentence that names what is nearest."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from .fleet import PoolSpec
from .label_selector import matches, parse_rule
from .nodes import ACCELERATOR, NODE_ID, THIS_MACHINE, Node

UNITS = {"CPU": "CPUs", "GPU": "GPUs"}
MAX_LISTED = 8


def no_fit(title: str, pool: PoolSpec, nodes: Sequence[Node]) -> str | None:
    """Why no node, however idle, could run a worker of the pool; None when one could."""
    fault = _no_fit(pool, nodes)
    if fault is None:
        return None
    is_own_ray = all(node.name == THIS_MACHINE for node in nodes)
    where = " (a Ray of its own has this machine alone; address names a cluster)" * is_own_ray
    return f"{title}: {fault}{where}"


def _no_fit(pool: PoolSpec, nodes: Sequence[Node]) -> str | None:
    labelled = [node for node in nodes if matches(pool.label_selector, node.labels)]
    if not labelled:
        return _selector(pool, nodes)
    wanted = pool.demand()
    for name, amount in wanted.items():
        if not any(node.has(name) >= amount for node in labelled):
            return _resource(name, amount, labelled, nodes)
    if any(all(node.has(name) >= n for name, n in wanted.items()) for node in labelled):
        return None
    return f"{_nobody(nodes)} has {amounts(wanted)} together; {_listing(labelled)}"


def no_room(title: str, pool: PoolSpec, fitting: Sequence[Node], num_placed: int) -> str:
    """Why the workers of a pool do not all find room beside what runs there already."""
    takes = f"takes {amounts(pool.demand())}" if pool.num_cpus else "takes what a node has free"
    wanted = max(1, pool.num_workers)  # one that sleeps will want a worker
    room = f"there is room for {num_placed} of its {wanted} workers"
    if wanted == 1:
        room = "there is no room for it"
    return f"{title}: {room} beside what else runs; each worker {takes}; {_listing(fitting, True)}"


def amounts(wanted: dict[str, float]) -> str:
    """Such as "4 CPUs, 1 GPUs, 1 slots"."""
    parts = [
        name.removeprefix(ACCELERATOR)
        if name.startswith(ACCELERATOR)
        else f"{amount:g} {UNITS.get(name, name)}"
        for name, amount in wanted.items()
    ]
    return ", ".join(parts) or "nothing"


def _selector(pool: PoolSpec, nodes: Sequence[Node]) -> str:
    for key, text in pool.label_selector.items():
        rule = parse_rule(text)
        if any(rule.fits(node.labels.get(key)) for node in nodes):
            continue
        values = sorted({node.labels[key] for node in nodes if key in node.labels})
        if rule.is_negated:
            return f"{key}: {text} leaves no node: all have {key}={', '.join(values)}"
        if not values:
            return f"{_nobody(nodes)} has a label {key}{_nearest_key(key, nodes)}"
        near = difflib.get_close_matches(rule.values[0], values, 1, 0.5)
        there = f"values there are {', '.join(values[:MAX_LISTED])}"
        hint = f"did you mean {near[0]}? {there}" if near else there
        return f"{_nobody(nodes)} has {key}={text}; {hint}"
    wanted = ", ".join(f"{key}: {text}" for key, text in pool.label_selector.items())
    return f"{_nobody(nodes)} has all of {wanted} together"


def _nearest_key(key: str, nodes: Sequence[Node]) -> str:
    keys = sorted({name for node in nodes for name in node.labels if name != NODE_ID})
    near = difflib.get_close_matches(key, keys, 1, 0.5)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; labels there are {', '.join(keys[:MAX_LISTED])}" if keys else "; none has labels"


def _resource(name: str, amount: float, labelled: Sequence[Node], nodes: Sequence[Node]) -> str:
    if name.startswith(ACCELERATOR):
        return _accelerator(name.removeprefix(ACCELERATOR), nodes)
    most = max((node.has(name) for node in labelled), default=0.0)
    unit = UNITS.get(name, name)
    if most:
        return (
            f"a worker takes {amount:g} {unit}, and {_nobody(labelled)} that fits its other "
            f"wishes has more than {most:g}"
        )
    if name == "GPU":
        return f"a worker takes {amount:g} GPUs, and {_nobody(labelled)} that fits has a GPU"
    known = sorted({n for node in nodes for n in node.total if _is_custom(n)})
    near = difflib.get_close_matches(name, known, 1, 0.5)
    hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known) or 'none'}"
    return f"{_nobody(labelled)} that fits has a resource {name}{hint}"


def _accelerator(kind: str, nodes: Sequence[Node]) -> str:
    there = sorted({name for node in nodes for name in node.accelerators})
    near = difflib.get_close_matches(kind, there, 1, 0.5)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(there) or 'none'}"
    return f"{_nobody(nodes)} has the accelerator_type {kind}; {hint}"


def _is_custom(resource: str) -> bool:
    is_rays = resource.startswith(("node:", ACCELERATOR))
    return not is_rays and resource not in ("CPU", "GPU", "memory", "object_store_memory")


def _nobody(nodes: Sequence[Node]) -> str:
    return "no node" + ("" if all(node.is_there for node in nodes) else ", now or to come,")


def _listing(nodes: Sequence[Node], is_free: bool = False) -> str:
    """What the nodes have, in short."""
    parts = []
    for node in nodes[:MAX_LISTED]:
        has = node.free if is_free and node.is_there else node.total
        sizes = [f"{has.get(name, 0):g} {UNITS[name]}" for name in UNITS if has.get(name)]
        sizes += [f"{amount:g} {name}" for name, amount in has.items() if _is_custom(name)]
        there = "free" if is_free and node.is_there else "in all"
        parts.append(f"{node.name} has {', '.join(sizes) or 'nothing'} {there}")
    more = len(nodes) - MAX_LISTED
    return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")
