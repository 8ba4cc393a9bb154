"""Root-mean-square normalisation, alone and with the residual added first.

Shapes: T tokens, H hidden size. Sums are taken in float32 whatever the input is.
"""

from __future__ import annotations

import torch


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last axis, in x's dtype (Zhang and
    Sennrich 2019).
    """
    if x_TH.dtype == torch.float32:
        return torch.nn.functional.rms_norm(x_TH, weight_H.shape, weight_H, eps)
    wide = x_TH.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return wide.to(x_TH.dtype) * weight_H


def add_rms_norm(
    x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(x + residual), x + residual)."""
    total_TH = x_TH + residual_TH
    return rms_norm(total_TH, weight_H, eps), total_TH
