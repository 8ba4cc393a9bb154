"""The contract of an attention backend: plan on the host once a step, attend once a layer."""

from __future__ import annotations

from typing import Protocol

import torch

from ..forward_batch import ForwardBatch


class AttentionBackend(Protocol):
    """Attention over paged keys and values. N query heads, D head dim, T tokens."""

    name: str

    def plan(self, batch: ForwardBatch) -> None:
        """Make what every layer of this batch shares (rows, masks); outside any graph."""
        ...

    def attend(self, q_TND: torch.Tensor, kv_layer: torch.Tensor, layer: int) -> torch.Tensor:
        """Attention of the planned batch in one layer; the layer's new keys are already stored.
        Returns [T, N, D].
        """
        ...
