"""The contract of a linear method: how weights are stored and multiplied."""

from __future__ import annotations

from typing import Protocol

import torch


class Linear(Protocol):
    """One stored weight matrix [out, in], with its bias where it has one."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x @ weight.T + bias: [rows, in] -> [rows, out]."""
        ...

    def dequantized(self) -> torch.Tensor:
        """The stored weights as a plain matrix [out, in], which the yardstick multiplies by."""
        ...

    @property
    def bias(self) -> torch.Tensor | None:
        """Bias [out] or None."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and bias as stored."""
        ...


class LinearMethod(Protocol):
    """Makes `Linear`s from checkpoint tensors."""

    name: str

    def pack(self, weights: list[torch.Tensor], biases: list[torch.Tensor] | None) -> Linear:
        """Store matrices [out_i, in] one above the other as a single matrix."""
        ...
