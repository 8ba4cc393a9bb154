"""Decode steps on a CPU as one native call: the graph runner over CPU graphs."""

from __future__ import annotations

from ..forward_mode import ForwardMode
from ..graphs.cpu import CpuGraph
from ..planning.capability import Capability
from .graph import GraphRunner
from .runner import RunnerParts

CAPABILITY = Capability(
    name="cpu_graph",
    kind="runner",
    source="runtime/runners/cpu_graph.py",
    devices=("cpu",),
    modes=(ForwardMode.DECODE,),
    captures_attention=True,
    captures_native=True,
    native_kernels=True,
)


class CPUGraphRunner(GraphRunner):
    """`GraphRunner` whose graphs are lists of native kernel calls."""


def build(parts: RunnerParts) -> CPUGraphRunner:
    """The runner; startup captures its graphs."""
    return CPUGraphRunner("cpu_graph", CpuGraph(parts.context.native), parts)
