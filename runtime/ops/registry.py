"""Who may compute everything but attention and linear layers: all ops tables, best first."""

from __future__ import annotations

from ..planning.candidate import Candidate

CANDIDATES = (
    Candidate("triton", "ops.triton"),
    Candidate("cpu_native", "ops.cpu_native"),
    Candidate("torch", "ops.torch"),
)
