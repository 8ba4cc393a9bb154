"""The frozen table of operations that a model calls; the planner picks one table, model code never
tests a device.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ..linear.method import Linear
from ..logits import Logits


class Ops(Protocol):
    """Everything a decoder needs besides linear layers and attention, at the grain of our fusions.

    Shapes: T tokens, H hidden size, I intermediate size, N query heads, K key/value heads, D head
    dim, V vocabulary, R rows.
    """

    name: str

    def rope(
        self, positions_T: torch.Tensor, inverse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cos and sin float32 [T, D / 2] of integer positions and inverse frequencies [D / 2]."""
        ...

    def select_rows(self, x_TH: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        """Rows of x by int64 index: [R, H]."""
        ...

    def norm(self, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm over the last axis."""
        ...

    def add_norm(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm(x + residual), x + residual)."""
        ...

    def qkv_norm_rope_store(
        self,
        qkv: torch.Tensor,  # [T, (N + 2K) * D]
        cos_sin: tuple[torch.Tensor, torch.Tensor],  # float32 [T, D / 2] each
        norms: tuple[torch.Tensor, torch.Tensor, float] | None,  # weights [D] of q and k, eps
        kv_layer: torch.Tensor,  # [P, 2, S, K, D]
        slots_T: torch.Tensor,
        num_heads: int,
    ) -> torch.Tensor:
        """Split, normalise q and k where the model does, rotate them, store k and v; return q [T,
        N, D].
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up: [T, 2 * I] -> [T, I]."""
        ...

    def logits(self, head: Linear, x_RH: torch.Tensor) -> Logits:
        """Logits float32 [R, V] by the output layer; with their argmax where it costs less in the
        forward pass than after it.
        """
        ...
