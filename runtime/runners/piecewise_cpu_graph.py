"""Prefill and mixed steps on a CPU as native calls between attention: the piecewise runner over CPU
graphs.
"""

from __future__ import annotations

from ..forward_mode import ForwardMode
from ..graphs.cpu import CpuGraph
from ..planning.capability import Capability
from .piecewise import PiecewiseRunner
from .runner import RunnerParts

CAPABILITY = Capability(
    name="piecewise_cpu_graph",
    kind="runner",
    source="runtime/runners/piecewise_cpu_graph.py",
    devices=("cpu",),
    modes=(ForwardMode.PREFILL, ForwardMode.MIXED),
    captures_native=True,
    native_kernels=True,
)


class PiecewiseCPUGraphRunner(PiecewiseRunner):
    """`PiecewiseRunner` over CPU graphs. They compute live rows only, so one size serves all."""


def build(parts: RunnerParts) -> PiecewiseCPUGraphRunner:
    """The runner; startup captures its graph."""
    mechanism = CpuGraph(parts.context.native)
    return PiecewiseCPUGraphRunner("piecewise_cpu_graph", mechanism, parts, [parts.max_tokens])
