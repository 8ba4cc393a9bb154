"""serve.yaml texts and fake nodes for tests of what is checked before a start."""

from __future__ import annotations

import textwrap
from pathlib import Path

from polypath.deployments.nodes import Node
from polypath.deployments.serve_config import ServeFile, read_serve_file

GPU_NODE = {"CPU": 8.0, "GPU": 1.0, "accelerator_type:H100": 1.0}


def write(folder: Path, text: str) -> Path:
    """The text, without its indentation, as serve.yaml."""
    path = folder / "serve.yaml"
    path.write_text(textwrap.dedent(text))
    return path


def read(folder: Path, text: str) -> ServeFile:
    """The text as it is read from a file."""
    return read_serve_file(write(folder, text))


def node(
    name: str,
    total: dict[str, float],
    labels: dict[str, str] | None = None,
    free: dict[str, float] | None = None,
) -> Node:
    """A node that is there, idle unless `free` says otherwise."""
    has = dict(total) if free is None else free
    labels = {"ray.io/node-id": f"id-{name}", **(labels or {})}
    return Node(name=name, id=f"id-{name}", total=dict(total), free=has, labels=labels)


def coming(name: str, total: dict[str, float], labels: dict[str, str], count: int) -> Node:
    """A node type that the autoscaler may add."""
    return Node(name=name, total=dict(total), labels=labels, count=count, is_there=False)
