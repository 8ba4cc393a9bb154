"""The ops table in plain torch: part of the yardstick."""

from __future__ import annotations

import torch

from ...kernels.rms_norm import add_rms_norm, rms_norm
from ...kernels.rotary import cos_sin as angles
from ...kernels.rotary import rotate
from ...kernels.silu_mul import silu_mul
from ...kernels.store_kv import store_kv
from ..build_context import BuildContext
from ..linear.method import Linear
from ..logits import Logits
from ..planning.capability import Capability

CAPABILITY = Capability(
    name="torch", kind="ops", source="runtime/ops/torch.py", devices=("cpu", "cuda")
)


class TorchOps:
    """See `Ops` for shapes."""

    name = "torch"

    def rope(
        self, positions_T: torch.Tensor, inverse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cos and sin."""
        return angles(positions_T, inverse)

    def select_rows(self, x_TH: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        """Rows of x."""
        return x_TH.index_select(0, rows_R)

    def norm(self, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm over the last axis."""
        return rms_norm(x_TH, weight_H, eps)

    def add_norm(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm(x + residual), x + residual)."""
        return add_rms_norm(x_TH, residual_TH, weight_H, eps)

    def qkv_norm_rope_store(
        self,
        qkv: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[torch.Tensor, torch.Tensor, float] | None,
        kv_layer: torch.Tensor,
        slots_T: torch.Tensor,
        num_heads: int,
    ) -> torch.Tensor:
        """Split, normalise, rotate, store; return q."""
        kv_heads, head_dim = kv_layer.shape[3:]
        heads = qkv.view(qkv.shape[0], num_heads + 2 * kv_heads, head_dim)
        q, k, v = heads.split((num_heads, kv_heads, kv_heads), dim=1)
        if norms is not None:
            q_weight, k_weight, eps = norms
            q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
        store_kv(kv_layer, slots_T, rotate(k, *cos_sin), v)
        return rotate(q, *cos_sin)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up."""
        return silu_mul(gate_up)

    def logits(self, head: Linear, x_RH: torch.Tensor) -> Logits:
        """Logits by the output layer."""
        return Logits(head(x_RH).float())


def build(context: BuildContext) -> TorchOps:
    """The table; it has no state."""
    return TorchOps()
