"""The ops table over our Triton kernels."""

from __future__ import annotations

import torch

from ...kernels.rotary import cos_sin as angles
from ...kernels.triton.argmax import argmax
from ...kernels.triton.rms_norm import add_rms_norm, rms_norm
from ...kernels.triton.rope_store import norm_rope_store
from ...kernels.triton.silu_mul import silu_mul
from ..build_context import BuildContext
from ..linear.method import Linear
from ..logits import Logits
from ..planning.capability import Capability

# Triton has the system's compiler build its launcher, at the first launch.
CAPABILITY = Capability(
    name="triton",
    kind="ops",
    source="runtime/ops/triton.py",
    devices=("cuda",),
    min_compute_capability=(7, 5),
    batch_invariant=True,
    packages=("triton>=3.6",),
    needs_compiler=True,
)


class TritonOps:
    """See `Ops` for shapes. What runs once a step, and copies or computes little, stays torch's."""

    name = "triton"

    def rope(
        self, positions_T: torch.Tensor, inverse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cos and sin; torch's, once a step."""
        return angles(positions_T, inverse)

    def select_rows(self, x_TH: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        """Rows of x; torch's, once a step."""
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
        return norm_rope_store(qkv, *cos_sin, norms, kv_layer, slots_T, num_heads)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up."""
        return silu_mul(gate_up)

    def logits(self, head: Linear, x_RH: torch.Tensor) -> Logits:
        """Logits by the output layer, and their argmax, which a graph then holds too."""
        logits_RV = head(x_RH).float()
        return Logits(logits_RV, argmax(logits_RV))


def build(context: BuildContext) -> TritonOps:
    """The table; it has no state."""
    return TritonOps()
