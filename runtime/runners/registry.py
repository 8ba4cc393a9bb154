"""How a forward pass may be launched: all runners, best first."""

from __future__ import annotations

from ..forward_mode import ForwardMode
from ..planning.candidate import Candidate, recorded
from ..planning.capability import Capability

CUDA_GRAPH = Capability(
    name="cuda_graph",
    kind="runner",
    source="runtime/runners/graph.py",
    devices=("cuda",),
    modes=(ForwardMode.DECODE,),
    captures_attention=True,
    built=False,
)
PIECEWISE_CUDA_GRAPH = Capability(
    name="piecewise_cuda_graph",
    kind="runner",
    source="runtime/runners/piecewise.py",
    devices=("cuda",),
    modes=(ForwardMode.PREFILL, ForwardMode.MIXED),
    built=False,
)

CANDIDATES = (
    recorded(CUDA_GRAPH),
    recorded(PIECEWISE_CUDA_GRAPH),
    Candidate("cpu_graph", "runners.cpu_graph"),
    Candidate("piecewise_cpu_graph", "runners.piecewise_cpu_graph"),
    Candidate("eager", "runners.eager"),
)
