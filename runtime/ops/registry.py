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
CPU_NATIVE = Capability(
    name="cpu_native",
    kind="ops",
    source="runtime/ops/cpu_native.py",
    devices=("cpu",),
    dtypes=("float32", "bfloat16"),
    architectures=("x86_64",),
    required_isa=("avx2", "fma", "f16c"),
    needs_compiler=True,
    built=False,
)

CANDIDATES = (
    recorded(TRITON),
    recorded(CPU_NATIVE),
    Candidate("torch", "ops.torch"),
)
