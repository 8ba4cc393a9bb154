"""The nodes that workers may run on: those Ray sees, and the types its autoscaler may add."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..runtime.errors import ConfigurationError
from .cluster_state import ClusterState

NODE_ID = "ray.io/node-id"
ACCELERATOR = "accelerator_type:"
THIS_MACHINE = "this machine"  # the only node of a Ray of our own


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One node, or (`is_there` False) a type of which up to `count` may be added."""

    name: str  # for messages: its address, or the type's name
    id: str = ""
    total: dict[str, float] = field(default_factory=dict)  # Ray's resources
    free: dict[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    count: int = 1
    is_there: bool = True
    is_here: bool = False  # the machine that asks

    @property
    def own_labels(self) -> dict[str, str]:
        """Labels that somebody gave it, without Ray's own."""
        return {k: v for k, v in self.labels.items() if not k.startswith("ray.io/")}

    @property
    def accelerators(self) -> tuple[str, ...]:
        """Ray's names of its cards."""
        names = (name for name in self.total if name.startswith(ACCELERATOR))
        return tuple(sorted(name.removeprefix(ACCELERATOR) for name in names))

    def has(self, resource: str) -> float:
        """How much of a resource it has in all. A type's list does not name its cards: any will
        do.
        """
        is_unnamed_card = not self.is_there and not self.accelerators and self.total.get("GPU")
        if resource.startswith(ACCELERATOR) and is_unnamed_card:
            return 1.0
        return self.total.get(resource, 0.0)


def this_machine(num_cpus: float, num_gpus: float = 0.0) -> Node:
    """The only node of a Ray of our own."""
    has = {"CPU": num_cpus} | ({"GPU": num_gpus} if num_gpus else {})
    return Node(name=THIS_MACHINE, total=has, free=dict(has), is_here=True)


def ray_nodes(cluster: ClusterState) -> list[Node]:
    """Nodes that are alive and node types that may come."""
    free = cluster.free()
    here = own_addresses()
    found = [_node(entry, free, here) for entry in cluster.nodes() if entry["Alive"]]
    return found + _types_to_come(cluster)


def _node(entry: Mapping[str, Any], free: Mapping[str, Any], here: set[str]) -> Node:
    """One entry of `ray.nodes()` (JSON)."""
    node_id, address = str(entry["NodeID"]), str(entry["NodeManagerAddress"])
    total = {name: float(amount) for name, amount in entry["Resources"].items()}
    return Node(
        name=address,
        id=node_id,
        total=total,
        free={name: float(amount) for name, amount in free.get(node_id, total).items()},
        labels=dict(entry.get("Labels") or {}),
        is_here=address in here,
    )


def own_addresses() -> set[str]:
    """Addresses and names of this machine."""
    import psutil

    found = {a.address for addresses in psutil.net_if_addrs().values() for a in addresses}
    return found | {"127.0.0.1", "localhost", "::1", socket.gethostname()}


def _types_to_come(cluster: ClusterState) -> list[Node]:
    """From the launcher's file where the autoscaler runs on this machine, else what it told Ray."""
    file = autoscaler_file(cluster.gcs_address)
    if file is not None:
        return node_types(file)
    return [
        Node(
            name=group.name,
            total={name: float(amount) for name, amount in group.resources.items()},
            count=group.max_count if group.max_count >= 0 else 10**6,
            is_there=False,
        )
        for group in cluster.autoscaler_groups()
    ]


def autoscaler_file(gcs_address: str) -> Path | None:
    """The launcher's file that the autoscaler of that Ray was started with, on this machine."""
    import psutil

    for process in psutil.process_iter(["cmdline"]):
        line: Sequence[str] = process.info["cmdline"] or ()
        is_monitor = any("autoscaler" in part and part.endswith("monitor.py") for part in line)
        if not is_monitor or f"--gcs-address={gcs_address}" not in line:
            continue
        for part in line:
            path = Path(part.partition("=")[2]).expanduser()
            if part.startswith("--autoscaling-config=") and path.is_file():
                return path
    return None


def node_types(file: Path) -> list[Node]:
    """Types in a file of Ray's cluster launcher, its head included. Raises ConfigurationError."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        types = content["available_node_types"]
        most = int(content.get("max_workers", 2))
        head = content.get("head_node_type")
        return [_type(name, entry, 1 if name == head else most) for name, entry in types.items()]
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, ValueError, AttributeError):
        raise ConfigurationError(
            f"{file} is no file of Ray's cluster launcher: it needs available_node_types, each "
            "with resources"
        ) from None


def _type(name: str, entry: Mapping[str, Any], most: int) -> Node:
    total = {key: float(amount) for key, amount in (entry.get("resources") or {}).items()}
    return Node(
        name=name,
        total=total,
        free=dict(total),
        labels={str(key): str(value) for key, value in (entry.get("labels") or {}).items()},
        count=min(most, int(entry.get("max_workers", most))) or 1,
        is_there=False,
    )
