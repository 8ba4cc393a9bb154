"""The contract of an attention backend: plan on the host once a step, attend once a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from ..forward_batch import ForwardBatch


class CapturedAttention(Protocol):
    """What attention reads within graphs of one bucket, at fixed addresses."""

    def refresh(self, batch: ForwardBatch) -> None:
        """Write this step's lengths; outside any graph, before each replay."""
        ...

    def use(self) -> None:
        """Let `attend` read from here; a capture follows."""
        ...

    def inputs(self) -> Sequence[torch.Tensor]:
        """The tensors whose addresses a graph holds."""
        ...


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


@runtime_checkable
class CapturableAttention(AttentionBackend, Protocol):
    """A backend whose record claims graph support: `attend` may run inside a capture."""

    def prepare_capture(self, batch: ForwardBatch) -> CapturedAttention:
        """Static metadata for graphs over decode batches of at most `batch`'s rows; `batch` has
        static tensors.
        """
        ...
