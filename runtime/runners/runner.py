"""The contract of a runner: how one forward pass is launched, and why it may decline a batch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from ..attention.backend import AttentionBackend
from ..build_context import BuildContext
from ..forward_batch import ForwardBatch
from ..kv.pool import KVPool
from ..logits import Logits
from ..models.decoder import Decoder


class Reason(StrEnum):
    """Why a step ran on the runner it ran on."""

    PLANNED = "planned"  # the runner that the plan names for this mode
    ABOVE_LARGEST_BUCKET = "above_largest_bucket"  # the batch is larger than any captured graph
    BUCKET_DROPPED = "bucket_dropped"  # its graph could not be captured at start
    PADDED_TOO_MUCH = "padded_too_much"  # the next graph is over twice as large as the batch
    RETRY_AFTER_FAILURE = (
        "retry_after_failure"  # the planned runner raised; eager ran the batch once more
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerParts:
    """What runners are built from."""

    model: Decoder
    kv: KVPool
    attention: AttentionBackend
    context: BuildContext
    capture_sizes: tuple[int, ...] = ()  # rows of the graphs of decode steps
    max_tokens: int = 0  # of one step
    max_rows: int = 0  # requests in one step
    max_pages: int = 0  # of one request


class Runner(Protocol):
    """Launches forward passes."""

    name: str

    def why_not(self, batch: ForwardBatch) -> Reason | None:
        """None when it takes this batch, else why not."""
        ...

    def run(self, batch: ForwardBatch) -> Logits:
        """Logits float32 [R, V] of one batch."""
        ...
