"""What the builders of backends, ops tables and linear methods may look at."""

from __future__ import annotations

from dataclasses import dataclass

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

    @property
    def native(self) -> Library:
        """The loaded native kernels."""
        assert self.library is not None, "a plan with native candidates names a build of them"
        return self.library
