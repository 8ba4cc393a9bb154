"""The tensors behind the pages: one pool of keys and values per layer, shared by every execution
path.
"""

from __future__ import annotations

import math

import torch

from ...kernels.cpu.host_memory import large_zeros
from ..config import ModelConfig


class KVPool:
    """Keys and values of all layers: per layer [num_pages, 2, page_size, kv_heads, head_dim], keys
    first.

    Zeroed, so that the scratch page and padding never hold a NaN; the system hands out the memory
    as pages are touched.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_pages, 2, page_size, model.num_kv_heads, model.head_dim)
        self.num_pages = num_pages
        self.page_size = page_size
        self.layers = [_zeros(shape, dtype, device) for _ in range(model.num_layers)]

    def touch(self) -> None:
        """On a CPU, have the system give the memory of each layer's first pages, which hold zeros
        already: a large page a layer, 4 ms each on a virtual machine, that the first step need not
        wait for.
        """
        if self.layers[0].device.type == "cpu":
            pages = [layer[:1] for layer in self.layers]
            # one call, so that Python's lock is given up once
            torch._foreach_zero_(pages)  # pyright: ignore[reportPrivateImportUsage]

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers."""
        return sum(layer.numel() * layer.element_size() for layer in self.layers)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU untouched pages of the system, where torch.zeros would write them all now."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return large_zeros(num_bytes).view(dtype).view(shape)
