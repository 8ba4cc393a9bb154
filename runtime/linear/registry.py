"""How weights may be stored and multiplied; the exact one first, so "auto" never rounds weights."""

from __future__ import annotations

from ..planning.candidate import Candidate, recorded
from ..planning.capability import Capability

INT8 = Capability(
    name="int8",
    kind="linear",
    source="runtime/linear/int8.py",
    devices=("cpu", "cuda"),
    min_compute_capability=(7, 5),
    built=False,
)
INT4_GROUP = Capability(
    name="int4_group",
    kind="linear",
    source="runtime/linear/int4_group.py",
    devices=("cpu",),
    dtypes=("float32", "bfloat16"),
    architectures=("x86_64",),
    required_isa=("avx2", "fma", "f16c"),
    needs_compiler=True,
    built=False,
)
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
    Candidate("dense", "linear.dense"),
    recorded(INT8),
    recorded(INT4_GROUP),
    recorded(FP8),
)
