"""The ops table over our native CPU kernels, float32 activations."""

from __future__ import annotations

import torch

from ...kernels.cpu import ops as native
from ...kernels.cpu.library import Library
from ..build_context import BuildContext
from ..linear.method import Linear
from ..linear.native import NativeLinear
from ..logits import Logits
from ..planning.capability import Capability

CAPABILITY = Capability(
    name="cpu_native",
    kind="ops",
    source="runtime/ops/cpu_native.py",
    devices=("cpu",),
    dtypes=("float32",),
    batch_invariant=True,
    native_kernels=True,
)


class CpuNativeOps:
    """See `Ops` for shapes."""

    name = "cpu_native"

    def __init__(self, library: Library) -> None:
        self._library = library

    def rope(
        self, positions_T: torch.Tensor, inverse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cos and sin."""
        return native.cos_sin(self._library, positions_T, inverse)

    def select_rows(self, x_TH: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        """Rows of x."""
        return native.gather_rows(self._library, x_TH, rows_R)

    def norm(self, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm over the last axis."""
        return native.rms_norm(self._library, x_TH, weight_H, eps)

    def add_norm(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm(x + residual), x + residual)."""
        return native.add_rms_norm(self._library, x_TH, residual_TH, weight_H, eps)

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
        return native.rope_store(self._library, qkv, cos_sin, norms, kv_layer, slots_T, num_heads)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up."""
        return native.silu_mul(self._library, gate_up)

    def logits(self, head: Linear, x_RH: torch.Tensor) -> Logits:
        """Logits by the output layer, and their argmax: of one kernel where it is one matrix."""
        if isinstance(head, NativeLinear):
            return Logits(*head.with_best(x_RH))
        logits_RV = head(x_RH).float()
        return Logits(logits_RV, native.argmax(self._library, logits_RV))


def build(context: BuildContext) -> CpuNativeOps:
    """The table over the plan's build of the kernels."""
    return CpuNativeOps(context.native)
