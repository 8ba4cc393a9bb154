"""What a planned worker can promise to a request: the facts that routing filters by."""

from __future__ import annotations

from ..attention import registry as attention
from ..linear import registry as linear
from ..ops import registry as ops
from .candidate import find
from .plan import ExecutionPlan

FEATURES = ("logprobs", "prompt_logprobs", "penalties", "logit_bias", "resume")
"""What every runner of this version serves, eager at the latest; a plan may come to lack some."""


def is_batch_invariant(plan: ExecutionPlan) -> bool:
    """Whether in every mode a row's result is the same bits whatever its neighbours are."""
    records = [find(linear.CANDIDATES, plan.linear_method).capability]
    for path in plan.paths.values():
        records += [find(attention.CANDIDATES, path.attention_backend).capability]
        records += [find(ops.CANDIDATES, path.ops).capability]
    return all(record.batch_invariant for record in records)
