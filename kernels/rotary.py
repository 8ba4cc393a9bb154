"""Rotary position embedding in the half-split ("NeoX") layout that Hugging Face checkpoints use.

Shapes: T tokens, N heads, D head dim. Frequencies are made in float32 (Su et al. 2021; `llama3`
rule: Llama 3.1's release).
"""

from __future__ import annotations

import math

import torch


def inverse_frequencies(head_dim: int, theta: float) -> torch.Tensor:
    """Return theta^(-2i/D) for i in 0..D/2, float32 [D/2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return 1.0 / (theta**exponents)


def llama3_frequencies(
    inverse: torch.Tensor,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position: int,
) -> torch.Tensor:
    """Stretch long wavelengths by `factor`, keep short ones, blend between (Llama 3.1)."""
    low_wavelength = original_max_position / low_freq_factor
    high_wavelength = original_max_position / high_freq_factor
    wavelength = 2 * math.pi / inverse
    smooth = (original_max_position / wavelength - low_freq_factor) / (
        high_freq_factor - low_freq_factor
    )
    blended = (1 - smooth) * inverse / factor + smooth * inverse
    stretched = torch.where(wavelength > low_wavelength, inverse / factor, inverse)
    is_medium = (wavelength >= high_wavelength) & (wavelength <= low_wavelength)
    return torch.where(is_medium, blended, stretched)


def cos_sin(positions_T: torch.Tensor, inverse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin [T, D/2] in float32 for integer positions."""
    angles = positions_T.float()[:, None] * inverse[None, :]
    return angles.cos(), angles.sin()


def rotate(x_TND: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (x[i], x[i + D/2]) by the position's angle; F = D/2. Keeps x's dtype."""
    first, second = x_TND.chunk(2, dim=-1)
    cos = cos_TF[:, None, :].to(x_TND.dtype)
    sin = sin_TF[:, None, :].to(x_TND.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
