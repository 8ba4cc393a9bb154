"""How a forward pass may be launched: all runners, best first."""

from __future__ import annotations

from ..planning.candidate import Candidate

CANDIDATES = (
    Candidate("cuda_graph", "runners.cuda_graph"),
    Candidate("piecewise_cuda_graph", "runners.piecewise_cuda_graph"),
    Candidate("cpu_graph", "runners.cpu_graph"),
    Candidate("piecewise_cpu_graph", "runners.piecewise_cpu_graph"),
    Candidate("eager", "runners.eager"),
)
