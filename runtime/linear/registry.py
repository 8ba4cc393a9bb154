"""How weights may be stored and multiplied; the exact one first, so "auto" never rounds weights."""

from __future__ import annotations

from ..planning.candidate import Candidate, recorded
from ..planning.capability import Capability

FP8 = Capability(
    name="fp8",
    kind="linear",
    source="runtime/linear/fp8.py",
    devices=("cuda",),
    dtypes=("bfloat16", "float16"),
    min_compute_capability=(8, 9),
    built=False,
)

CANDIDATES = (
    Candidate("dense_native", "linear.dense_native"),
    Candidate("dense", "linear.dense"),
    Candidate("int8", "linear.int8"),
    Candidate("int4_group", "linear.int4_group"),
    recorded(FP8),
)
