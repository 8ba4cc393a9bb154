"""Keeps what each operation of a forward pass gave, in eager passes and in graphs alike.

A tap is one more copy into a buffer of its own, recorded with the operations around it, so that
nothing of a capture changes but its length. It can also put another path's values in place of what
it saw: then each operation after it starts from those.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..kernels.cpu.library import Library
from ..kernels.cpu.ops import copy_rows
from .attention.backend import AttentionBackend, CapturableAttention, CapturedAttention
from .forward_batch import ForwardBatch
from .linear.method import Linear
from .logits import Logits
from .models.decoder import Decoder, DecoderLayer, DecoderWeights
from .ops.ops import Ops


@dataclass(frozen=True, slots=True)
class TapName:
    """One result of one operation. `layer` is None before the first and after the last block."""

    layer: int | None
    operation: str


class Taps:
    """The buffers [max_tokens, width] of one model's taps, in the order of the operations.

    They are made during the first pass, which must be eager: a capture would put them among the
    tensors that die with their last use.
    """

    def __init__(self, max_tokens: int, library: Library | None, *, forced: bool = False) -> None:
        self.layer = 0  # whose operations run; the first linear layer of each block says so
        self._max_tokens = max_tokens
        self._library = library
        self._seen: dict[TapName, torch.Tensor] = {}
        self._given: dict[TapName, torch.Tensor] | None = {} if forced else None

    def keep(self, layer: int | None, operation: str, result: torch.Tensor) -> torch.Tensor:
        """Copy `result` [T, ...], whose first dimension is tokens; returns it, with the given
        values in it where there are any.
        """
        name = TapName(layer, operation)
        rows = result.shape[0]
        if name not in self._seen:
            self._reserve(name, result)
        self._copy(result, self._seen[name][:rows])
        if self._given is not None:
            self._copy(self._given[name][:rows], result)
        return result

    def read(self, num_tokens: int) -> dict[TapName, torch.Tensor]:
        """What the last pass gave, float32 [T, width]; valid until the next pass."""
        return {name: seen[:num_tokens].float() for name, seen in self._seen.items()}

    def give(self, values: dict[TapName, torch.Tensor]) -> None:
        """Put these [T, width] in place of what the operations give from now on."""
        assert self._given is not None, "only taps that were made to force take values"
        for name, given in self._given.items():
            given[: values[name].shape[0]] = values[name]

    def _reserve(self, name: TapName, like: torch.Tensor) -> None:
        shape = (self._max_tokens, like.numel() // like.shape[0])
        self._seen[name] = torch.zeros(shape, dtype=like.dtype, device=like.device)
        if self._given is not None:
            self._given[name] = torch.zeros_like(self._seen[name])

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        is_plain = source.is_contiguous() and target.is_contiguous()
        if self._library is not None and is_plain and source.dtype == torch.float32:
            copy_rows(self._library, source, target)
        else:
            target.copy_(source.view(target.shape) if is_plain else source.reshape(target.shape))


class TappedLinear:
    """See `Linear`."""

    def __init__(self, inner: Linear, taps: Taps, layer: int | None, name: str) -> None:
        self._inner = inner
        self._taps = taps
        self._layer = layer
        self._name = name

    @property
    def inner(self) -> Linear:
        """The layer whose results are kept."""
        return self._inner

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x @ weight.T + bias."""
        if self._layer is not None:
            self._taps.layer = self._layer
        return self._taps.keep(self._layer, self._name, self._inner(x))

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Rows of the weights."""
        return self._taps.keep(self._layer, self._name, self._inner.rows(index))

    def dequantized(self) -> torch.Tensor:
        """The stored weights as a plain matrix."""
        return self._inner.dequantized()

    def pieces(self) -> Iterator[torch.Tensor]:
        """The same, cut where the layer cuts it."""
        return self._inner.pieces()

    @property
    def bias(self) -> torch.Tensor | None:
        """Bias or None."""
        return self._inner.bias

    @property
    def num_bytes(self) -> int:
        """Bytes as stored."""
        return self._inner.num_bytes


class TappedOps:
    """See `Ops`. Norms are told apart by their weights."""

    def __init__(self, inner: Ops, taps: Taps, weights: DecoderWeights) -> None:
        self.name = inner.name
        self._inner = inner
        self._taps = taps
        self._norms: dict[int, tuple[int | None, str]] = {id(weights.final_norm): (None, "final_")}
        for i, layer in enumerate(weights.layers):
            self._norms[id(layer.input_norm)] = i, "input_"
            self._norms[id(layer.post_norm)] = i, "post_"

    def rope(
        self, positions_T: torch.Tensor, inverse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cos and sin."""
        cos, sin = self._inner.rope(positions_T, inverse)
        return self._taps.keep(None, "rope cos", cos), self._taps.keep(None, "rope sin", sin)

    def select_rows(self, x_TH: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        """Rows of x: values move, none is computed."""
        return self._inner.select_rows(x_TH, rows_R)

    def norm(self, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm over the last axis."""
        layer, which = self._norms[id(weight_H)]
        return self._taps.keep(layer, f"{which}norm", self._inner.norm(x_TH, weight_H, eps))

    def add_norm(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm(x + residual), x + residual)."""
        layer, which = self._norms[id(weight_H)]
        normed, total = self._inner.add_norm(x_TH, residual_TH, weight_H, eps)
        total = self._taps.keep(layer, f"{which}add_norm sum", total)
        return self._taps.keep(layer, f"{which}add_norm", normed), total

    def qkv_norm_rope_store(
        self,
        qkv: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[torch.Tensor, torch.Tensor, float] | None,
        kv_layer: torch.Tensor,
        slots_T: torch.Tensor,
        num_heads: int,
    ) -> torch.Tensor:
        """Split, normalise, rotate, store; return q."""
        q_TND = self._inner.qkv_norm_rope_store(qkv, cos_sin, norms, kv_layer, slots_T, num_heads)
        return self._taps.keep(self._taps.layer, "qkv_norm_rope_store", q_TND)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up."""
        return self._taps.keep(self._taps.layer, "silu_mul", self._inner.silu_mul(gate_up))

    def logits(self, head: Linear, x_RH: torch.Tensor) -> Logits:
        """Logits by the output layer."""
        found = self._inner.logits(head.inner if isinstance(head, TappedLinear) else head, x_RH)
        return Logits(self._taps.keep(None, "lm_head", found.values), found.best)


class TappedAttention:
    """See `AttentionBackend`."""

    def __init__(self, inner: AttentionBackend, taps: Taps) -> None:
        self.name = inner.name
        self._inner = inner
        self._taps = taps

    def plan(self, batch: ForwardBatch) -> None:
        """Make what every layer shares."""
        self._inner.plan(batch)

    def attend(self, q_TND: torch.Tensor, kv_layer: torch.Tensor, layer: int) -> torch.Tensor:
        """Attention of the planned batch in one layer."""
        return self._taps.keep(layer, "attention", self._inner.attend(q_TND, kv_layer, layer))


class TappedCapturable(TappedAttention):
    """See `CapturableAttention`."""

    def __init__(self, inner: CapturableAttention, taps: Taps) -> None:
        super().__init__(inner, taps)
        self._capturable = inner

    def prepare_capture(self, batch: ForwardBatch) -> CapturedAttention:
        """The backend's own static metadata."""
        return self._capturable.prepare_capture(batch)


def tap_attention(backend: AttentionBackend, taps: Taps) -> AttentionBackend:
    """A backend whose results are kept."""
    if isinstance(backend, CapturableAttention):
        return TappedCapturable(backend, taps)
    return TappedAttention(backend, taps)


def tap_model(model: Decoder, taps: Taps) -> Decoder:
    """A decoder over the same weights whose operations are all kept."""
    weights = model.weights
    tapped = DecoderWeights(
        embedding=TappedLinear(weights.embedding, taps, None, "embedding"),
        layers=tuple(_tap_layer(layer, taps, i) for i, layer in enumerate(weights.layers)),
        final_norm=weights.final_norm,
        lm_head=TappedLinear(weights.lm_head, taps, None, "lm_head"),
    )
    return Decoder(model.config, tapped, TappedOps(model.ops, taps, weights))


def _tap_layer(layer: DecoderLayer, taps: Taps, index: int) -> DecoderLayer:
    return DecoderLayer(
        input_norm=layer.input_norm,
        qkv=TappedLinear(layer.qkv, taps, index, "qkv"),
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        o=TappedLinear(layer.o, taps, index, "o"),
        post_norm=layer.post_norm,
        gate_up=TappedLinear(layer.gate_up, taps, index, "gate_up"),
        down=TappedLinear(layer.down, taps, index, "down"),
    )
