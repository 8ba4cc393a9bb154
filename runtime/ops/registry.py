"""Who may compute everything but attention and linear layers: all ops tables, best first."""

from __future__ import annotations

from ..planning.candidate import Candidate, recorded
from ..planning.capability import Capability

TRITON = Capability(
    name="triton",
    kind="ops",
    source="runtime/ops/triton.py",
    devices=("cuda",),
    min_compute_capability=(7, 5),
    packages=("triton",),
    built=False,
)
CANDIDATES = (
    recorded(TRITON),
    Candidate("cpu_native", "ops.cpu_native"),
    Candidate("torch", "ops.torch"),
)
