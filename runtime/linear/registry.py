"""How weights may be stored and multiplied: native kernels, torch's 8 bits, plain torch.

Before their place here counts what they do to the checkpoint's weights (planning/selection.py):
those that hold them as they are go first, those that round them last, so "auto" never rounds.
"""

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
    Candidate("int8", "linear.int8"),
    Candidate("int4_group", "linear.int4_group"),
    Candidate("torch_int8", "linear.torch_int8"),
    Candidate("dense", "linear.dense"),
    recorded(FP8),
)
