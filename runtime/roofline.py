"""How near a measured rate is to what the machine allows.

A pass must read its weights and keys and values once, and multiply. The roofline time is the
longest of

- bytes read / read bandwidth,
- 2 x MACs of the linear layers / matrix rate (int8 where weights are stored in 8 bits or fewer,
  else fp32) + 2 x MACs of attention / fp32 rate,

and the share is the roofline time over the measured time. The rates are torch's (ceilings.py), so
a kernel that is better than torch's may exceed 100 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .ceilings import Ceilings
from .config import ModelConfig

Bound = Literal["read", "compute"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCost:
    """What one engine's model costs, by its storage."""

    config: ModelConfig
    weight_bytes: int  # of all weights as stored, a tied head counted once
    embedding_bytes: int  # of an embedding that is only looked up; 0 where it is the head too
    kv_itemsize: int  # bytes of one element of keys and values
    is_int8: bool  # whether linear layers multiply integers

    def decode(self, batch: int, context: float) -> Cost:
        """One decode step of `batch` rows, each with `context` tokens of keys and values."""
        kv = batch * context * self.config.kv_bytes_per_token(self.kv_itemsize)
        return Cost(
            read_bytes=self.weight_bytes - self.embedding_bytes + kv,
            linear_macs=batch * (self._layer_macs() + self._head_macs()),
            attention_macs=batch * context * self._attention_macs(),
        )

    def prefill(self, batch: int, tokens: int, budget: int) -> Cost:
        """Prompts of `tokens` each, in steps of at most `budget` tokens, one row of logits each.

        Each token attends to those before it and itself. Weights are read once a step.
        """
        steps = -(-batch * tokens // budget)
        pairs = batch * tokens * (tokens + 1) / 2
        return Cost(
            read_bytes=steps * (self.weight_bytes - self.embedding_bytes),
            linear_macs=batch * (tokens * self._layer_macs() + self._head_macs()),
            attention_macs=pairs * self._attention_macs(),
        )

    def _layer_macs(self) -> int:
        """MACs of all linear layers of a token, the head excepted."""
        c = self.config
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        per_layer = c.hidden_size * (q + 2 * kv) + q * c.hidden_size
        return c.num_layers * (per_layer + 3 * c.hidden_size * c.intermediate_size)

    def _head_macs(self) -> int:
        return self.config.vocab_size * self.config.hidden_size

    def _attention_macs(self) -> int:
        """MACs of one query token with one key and its value, over all layers and heads."""
        c = self.config
        return 2 * c.num_layers * c.num_heads * c.head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Bytes and MACs of some work; a sliding window is not subtracted."""

    read_bytes: float
    linear_macs: float
    attention_macs: float

    def roofline(self, top: Ceilings, *, is_int8: bool) -> tuple[float, Bound]:
        """(seconds at least, what bounds them)."""
        rate = top.int8_gop_s if is_int8 else top.fp32_gflop_s
        read = self.read_bytes / top.read_gb_s / 1e9
        compute = 2 * (self.linear_macs / rate + self.attention_macs / top.fp32_gflop_s) / 1e9
        return (read, "read") if read >= compute else (compute, "compute")
