"""The gate of a SwiGLU block: silu(gate) * up.

Shapes: T tokens, I intermediate size.
"""

from __future__ import annotations

import torch


def silu_mul(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up [T, I]; the input holds gate in its first half, then up."""
    gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate_TI) * up_TI
