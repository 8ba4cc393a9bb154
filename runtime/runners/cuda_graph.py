"""Decode steps on a GPU as one launch: the graph runner over CUDA graphs."""

from __future__ import annotations

from ..forward_mode import ForwardMode
from ..graphs.cuda import CudaGraph
from ..graphs.mechanism import GraphMechanism
from ..planning.capability import Capability
from .graph import GraphRunner
from .runner import RunnerParts

CAPABILITY = Capability(
    name="cuda_graph",
    kind="runner",
    source="runtime/runners/cuda_graph.py",
    devices=("cuda",),
    modes=(ForwardMode.DECODE,),
    captures_attention=True,
)


class CudaGraphRunner(GraphRunner):
    """`GraphRunner` whose graphs compute all their rows: one for every few sizes."""

    def __init__(self, mechanism: GraphMechanism, parts: RunnerParts) -> None:
        super().__init__("cuda_graph", mechanism, parts)


def build(parts: RunnerParts) -> CudaGraphRunner:
    """The runner; startup captures its graphs."""
    return CudaGraphRunner(CudaGraph(), parts)
