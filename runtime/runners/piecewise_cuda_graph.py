"""Prefill and mixed steps on a GPU as graphs between attention: the piecewise runner over CUDA
graphs.
"""

from __future__ import annotations

from ..forward_mode import ForwardMode
from ..graphs.cuda import CudaGraph
from ..graphs.mechanism import GraphMechanism
from ..planning.capability import Capability
from ..planning.capture_sizes import token_sizes
from .piecewise import PiecewiseRunner
from .runner import RunnerParts

CAPABILITY = Capability(
    name="piecewise_cuda_graph",
    kind="runner",
    source="runtime/runners/piecewise_cuda_graph.py",
    devices=("cuda",),
    modes=(ForwardMode.PREFILL, ForwardMode.MIXED),
)


class PiecewiseCudaGraphRunner(PiecewiseRunner):
    """`PiecewiseRunner` with graphs that compute all their tokens: one for every few sizes."""

    def __init__(self, mechanism: GraphMechanism, parts: RunnerParts) -> None:
        super().__init__("piecewise_cuda_graph", mechanism, parts, token_sizes(parts.max_tokens))


def build(parts: RunnerParts) -> PiecewiseCudaGraphRunner:
    """The runner; startup captures its graphs."""
    return PiecewiseCudaGraphRunner(CudaGraph(), parts)
