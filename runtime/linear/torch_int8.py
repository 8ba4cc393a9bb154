"""8-bit weights with one scale for each output, multiplied by torch's FBGEMM: no compiler needed.

FBGEMM's AVX2 kernels add two products of 8 bits in 16 and would saturate, so activations get 7: a
number for each and, as outliers need more, a second one for what the first leaves over (7 bits
alone cost SmolLM2 12% of perplexity, and 8 still 4%). Each row is scaled by its own largest number,
so it does not depend on its neighbours; `linear_dynamic` takes one scale for the whole batch. torch
has announced that quantized tensors will go in some later release; this method goes with them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch

from ...kernels.cpu.packed import PIECE_NUMBERS
from ..allocator import large_blocks_apart
from ..build_context import BuildContext
from ..planning.capability import Capability
from .method import Stored

CAPABILITY = Capability(
    name="torch_int8",
    kind="linear",
    source="runtime/linear/torch_int8.py",
    devices=("cpu",),
    dtypes=("float32",),
    architectures=("x86_64",),
    required_isa=("avx2",),
    batch_invariant=True,
    quantizes=("int8",),
)

STEPS = 63  # of 7 bits, on either side of zero
ZERO = 64
LEAST = 1e-30  # rows of smaller numbers count as zero
FLOATS_AT_ONCE = 1 << 20  # weights that are widened together


class TorchInt8Linear:
    """One weight matrix [N, K]: packed for FBGEMM, as a table for lookups, or both."""

    def __init__(
        self,
        weight_NK: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        is_table: bool = False,
        is_multiplied: bool = True,
    ) -> None:
        values, self._scales_N1 = _rounded(weight_NK)
        self._table_NK = values if is_table else None
        self._packed = _prepack(values, self._scales_N1[:, 0]) if is_multiplied else None
        self.bias = bias
        self.num_bytes = values.numel() * (is_table + is_multiplied) + 4 * values.shape[0]
        self.num_bytes += 0 if bias is None else 4 * bias.numel()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T + bias; a row with NaN or infinity becomes NaN and harms no other."""
        assert self._packed is not None, "an embedding that is no output layer is only looked up"
        if not x.shape[0]:
            return x.new_empty(0, self._scales_N1.shape[0])
        largest_R1 = x.abs().amax(1, keepdim=True)
        first = (x / largest_R1.clamp_min(LEAST)).nan_to_num_(0.0)
        rest = first - (first * STEPS).round_() / STEPS  # at most half a step
        both = torch.cat((first, rest * (2 * STEPS)))
        multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        coarse, fine = multiply(both, 1 / STEPS, ZERO, self._packed).chunk(2)
        out = coarse.add_(fine, alpha=1 / (2 * STEPS)).mul_(largest_R1)
        return out if self.bias is None else out.add_(self.bias)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Dequantized rows."""
        return self._values().index_select(0, index) * self._scales_N1.index_select(0, index)

    def dequantized(self) -> torch.Tensor:
        """The whole matrix in float32."""
        with large_blocks_apart():  # in one heap with them, torch's widened copies leave gaps
            return self._values() * self._scales_N1

    def pieces(self) -> Iterator[torch.Tensor]:
        """Rows in float32, PIECE_NUMBERS or a little more at a time."""
        values = self._values()
        rows = -(-PIECE_NUMBERS // values.shape[1])
        for part, scales in zip(values.split(rows), self._scales_N1.split(rows), strict=True):
            yield part * scales

    def _values(self) -> torch.Tensor:
        if self._table_NK is not None:
            return self._table_NK
        with _no_deprecation(), large_blocks_apart():
            return torch.ops.quantized.linear_unpack(self._packed)[0].int_repr()


class TorchInt8Method:
    """Rounds all matrices to 8 bits, from floats."""

    name = "torch_int8"
    keeps_blocks = False

    def pack(self, weights: list[Stored], biases: list[torch.Tensor] | None) -> TorchInt8Linear:
        """One matrix of all parts."""
        bias = None if biases is None else torch.cat(biases).float()
        return TorchInt8Linear(_stacked(weights), bias)

    def pack_embedding(self, weight: Stored, *, is_head: bool) -> TorchInt8Linear:
        """A table, and packed too where it is the output layer."""
        return TorchInt8Linear(_stacked([weight]), None, is_table=True, is_multiplied=is_head)

    def pack_head(self, weight: Stored) -> TorchInt8Linear:
        """A matrix without bias."""
        return TorchInt8Linear(_stacked([weight]), None)


def _stacked(weights: list[Stored]) -> torch.Tensor:
    plain = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    assert len(plain) == len(weights), "torch_int8 is given floats"
    return plain[0] if len(plain) == 1 else torch.cat(plain)


def _rounded(weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 [N, K], scales [N, 1]), some rows at a time: no widened copy of the matrix."""
    rows, inputs = weight_NK.shape
    values = torch.empty(rows, inputs, dtype=torch.int8)
    scales = torch.empty(rows, 1)
    at_once = max(1, FLOATS_AT_ONCE // max(1, inputs))
    for piece, out, scale in zip(
        *(t.split(at_once) for t in (weight_NK, values, scales)), strict=True
    ):
        wide = piece.float()
        scale.copy_(wide.abs().amax(1, keepdim=True).clamp_min(LEAST) / 127)
        out.copy_((wide / scale).round_())
    return values, scales


def _prepack(values_NK: torch.Tensor, scales_N: torch.Tensor) -> torch.ScriptObject:
    zeros = torch.zeros(values_NK.shape[0], dtype=torch.int64)
    with _no_deprecation():
        weight = torch.ops.aten._make_per_channel_quantized_tensor(
            values_NK, scales_N.double(), zeros, 0
        )
        return torch.ops.quantized.linear_prepack(weight, None)


def _no_deprecation() -> warnings.catch_warnings:
    """Without torch's warning that quantized tensors will go: nobody who serves can act on it."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)


def build(context: BuildContext) -> TorchInt8Method:
    """The method; sets the engine of this process's quantized operations to FBGEMM."""
    torch.backends.quantized.engine = "fbgemm"
    return TorchInt8Method()
