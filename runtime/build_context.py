"""What the builders of backends, ops tables and linear methods may look at."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..kernels.cpu.library import Library
from .config import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildContext:
    """One worker's model and the values its plan settled; `library` only where the plan uses
    native kernels.
    """

    model: ModelConfig
    dtype: torch.dtype
    device: torch.device
    library: Library | None = None
    quantization: str = "stored"  # of the plan: what weights are rounded to
    page_size: int = 16  # tokens
    flash_attn_library: str | None = None  # a file with FlashAttention, where the user named one
    notes: list[str] = field(default_factory=list)  # builders add what the plan's events should say

    @property
    def native(self) -> Library:
        """The loaded native kernels."""
        assert self.library is not None, "a plan with native candidates names a build of them"
        return self.library
