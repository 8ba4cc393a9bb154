"""The contract of a runner: how one forward pass is launched, and why it may decline a batch."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import torch

from ..forward_batch import ForwardBatch


class Reason(StrEnum):
    """Why a step ran on the runner it ran on."""

    PLANNED = "planned"  # the runner that the plan names for this mode
    RETRY_AFTER_FAILURE = (
        "retry_after_failure"  # the planned runner raised; eager ran the batch once more
    )


class Runner(Protocol):
    """Launches forward passes."""

    name: str

    def why_not(self, batch: ForwardBatch) -> Reason | None:
        """None when it takes this batch, else why not."""
        ...

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits float32 [R, V] of one batch."""
        ...
