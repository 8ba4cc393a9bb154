"""Linear layers with plain weights in the plan's dtype, multiplied by torch."""

from __future__ import annotations

import torch

from ..planning.capability import Capability

CAPABILITY = Capability(
    name="dense", kind="linear", source="runtime/linear/dense.py", devices=("cpu", "cuda")
)


class DenseLinear:
    """Weight [out, in] as it is."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x @ weight.T + bias."""
        return torch.nn.functional.linear(x, self.weight, self.bias)

    def dequantized(self) -> torch.Tensor:
        """The weight itself."""
        return self.weight

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias."""
        bias = 0 if self.bias is None else self.bias.numel() * self.bias.element_size()
        return self.weight.numel() * self.weight.element_size() + bias


class DenseMethod:
    """Stores weights in one dtype on one device."""

    name = "dense"

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device

    def pack(self, weights: list[torch.Tensor], biases: list[torch.Tensor] | None) -> DenseLinear:
        """Stack the matrices; one alone is not copied when it already has the right dtype."""
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        bias = None if biases is None else torch.cat(biases)
        return DenseLinear(self._place(weight), None if bias is None else self._place(bias))

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=self._device, dtype=self._dtype).contiguous()


def build(dtype: torch.dtype, device: torch.device) -> DenseMethod:
    """The method that stores weights in `dtype` on `device`."""
    return DenseMethod(dtype, device)
