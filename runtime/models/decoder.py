"""The dense decoder of the Llama, Mistral, Qwen2 and Qwen3 families; what differs between them is
data in `ModelConfig`.

Shapes: T tokens, R rows of logits, H hidden size, V vocabulary, N query heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...kernels.rotary import inverse_frequencies, llama3_frequencies
from ..attention.backend import AttentionBackend
from ..config import ModelConfig, RopeConfig
from ..forward_batch import ForwardBatch
from ..kv.pool import KVPool
from ..linear.method import Linear
from ..logits import Logits
from ..ops.ops import Ops


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderLayer:
    """Weights of one block. `q_norm` and `k_norm` [D] only where the family normalises heads
    (Qwen3).
    """

    input_norm: torch.Tensor  # [H]
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    post_norm: torch.Tensor  # [H]
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderWeights:
    """All weights of a decoder, and where they lie."""

    embedding: Linear  # [V, H]
    layers: tuple[DecoderLayer, ...]
    final_norm: torch.Tensor  # [H]
    lm_head: Linear


class Decoder:
    """Runs one `ForwardBatch` and returns logits [R, V] in float32."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, ops: Ops) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops
        self._inverse = rope_frequencies(config.rope, config.head_dim).to(weights.final_norm.device)

    def forward(self, batch: ForwardBatch, kv: KVPool, attention: AttentionBackend) -> Logits:
        """One forward pass; `attention.plan(batch)` has been called."""
        return self.logits(*self.layers(batch, kv, attention), batch.logits_rows)

    def layers(
        self, batch: ForwardBatch, kv: KVPool, attention: AttentionBackend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All blocks: the last output [T, H], and the residual [T, H] that it is to be added to."""
        eps = self.config.rms_norm_eps
        rope = self.ops.rope(batch.positions, self._inverse)
        residual = self.weights.embedding.rows(batch.input_ids)
        x = self.ops.norm(residual, self.weights.layers[0].input_norm, eps)
        for i, layer in enumerate(self.weights.layers):
            attended = self._attention(i, layer, x, rope, batch, kv, attention)
            x, residual = self.ops.add_norm(attended, residual, layer.post_norm, eps)
            x = layer.down(self.ops.silu_mul(layer.gate_up(x)))
            if i + 1 < len(self.weights.layers):
                following = self.weights.layers[i + 1].input_norm
                x, residual = self.ops.add_norm(x, residual, following, eps)
        return x, residual

    def logits(self, x: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor) -> Logits:
        """Logits [R, V] of some rows of what `layers` returned."""
        x, residual = self.ops.select_rows(x, rows), self.ops.select_rows(residual, rows)
        x, _ = self.ops.add_norm(x, residual, self.weights.final_norm, self.config.rms_norm_eps)
        return self.ops.logits(self.weights.lm_head, x)

    def _attention(
        self,
        index: int,
        layer: DecoderLayer,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        batch: ForwardBatch,
        kv: KVPool,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = (layer.q_norm, layer.k_norm, self.config.rms_norm_eps)
        q_TND = self.ops.qkv_norm_rope_store(
            layer.qkv(x), rope, norms, kv.layers[index], batch.slots, self.config.num_heads
        )
        out_TND = attention.attend(q_TND, kv.layers[index], index)
        return layer.o(out_TND.reshape(out_TND.shape[0], -1))


def rope_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Inverse frequencies float32 [D / 2] with the checkpoint's scaling applied."""
    inverse = inverse_frequencies(head_dim, rope.theta)
    if rope.scaling == "linear":
        return inverse / rope.factor
    if rope.scaling == "llama3":
        return llama3_frequencies(
            inverse,
            factor=rope.factor,
            low_freq_factor=rope.low_freq_factor,
            high_freq_factor=rope.high_freq_factor,
            original_max_position=rope.original_max_position,
        )
    return inverse
