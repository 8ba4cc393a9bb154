"""Linear layers with plain weights in the plan's dtype, multiplied by torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..build_context import BuildContext
from ..planning.capability import Capability
from .method import Stored

CAPABILITY = Capability(
    name="dense",
    kind="linear",
    source="runtime/linear/dense.py",
    devices=("cpu", "cuda"),
    keeps_stored=("float32", "bfloat16", "float16"),
)


class DenseLinear:
    """Weight [out, in] as it is."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x @ weight.T + bias."""
        return torch.nn.functional.linear(x, self.weight, self.bias)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Rows of the weight."""
        return self.weight.index_select(0, index)

    def dequantized(self) -> torch.Tensor:
        """The weight itself."""
        return self.weight

    def pieces(self) -> Iterator[torch.Tensor]:
        """The weight itself, in one."""
        yield self.weight

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias."""
        bias = 0 if self.bias is None else self.bias.numel() * self.bias.element_size()
        return self.weight.numel() * self.weight.element_size() + bias


class DenseMethod:
    """Stores weights in one dtype on one device."""

    name = "dense"
    keeps_blocks = False

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device

    def pack(self, weights: list[Stored], biases: list[torch.Tensor] | None) -> DenseLinear:
        """Stack the matrices; one alone is copied too, since the file's map is given back."""
        plain = [weight for weight in weights if isinstance(weight, torch.Tensor)]
        assert len(plain) == len(weights), "a dense method is given floats"
        alone = len(plain) == 1 and plain[0].dtype == self._dtype
        weight = plain[0].clone() if alone else plain[0] if len(plain) == 1 else torch.cat(plain)
        bias = None if biases is None else torch.cat(biases)
        return DenseLinear(self._place(weight), None if bias is None else self._place(bias))

    def pack_embedding(self, weight: Stored, *, is_head: bool) -> DenseLinear:
        """The same: rounded to the plan's dtype only."""
        return self.pack([weight], None)

    def pack_head(self, weight: Stored) -> DenseLinear:
        """The same."""
        return self.pack([weight], None)

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=self._device, dtype=self._dtype).contiguous()


def build(context: BuildContext) -> DenseMethod:
    """The method that stores weights in the plan's dtype on its device. Parts of a card's product
    are added in float32: in float16, as torch allows by default, their sum may be infinite.
    """
    if context.device.type == "cuda":
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return DenseMethod(context.dtype, context.device)
