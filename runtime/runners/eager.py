"""Launches each operation from Python: takes every batch, and is the last resort of every plan."""

from __future__ import annotations

import torch

from ..attention.backend import AttentionBackend
from ..forward_batch import ForwardBatch
from ..kv.pool import KVPool
from ..logits import Logits
from ..models.decoder import Decoder
from ..planning.capability import Capability
from .runner import Reason, RunnerParts

CAPABILITY = Capability(
    name="eager", kind="runner", source="runtime/runners/eager.py", devices=("cpu", "cuda")
)


class EagerRunner:
    """Plans attention on the host, then calls the model."""

    name = "eager"

    def __init__(self, model: Decoder, kv: KVPool, attention: AttentionBackend) -> None:
        self._model = model
        self._kv = kv
        self._attention = attention

    def why_not(self, batch: ForwardBatch) -> Reason | None:
        """Never declines."""
        return None

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> Logits:
        """Logits float32 [R, V]."""
        self._attention.plan(batch)
        return self._model.forward(batch, self._kv, self._attention)


def build(parts: RunnerParts) -> EagerRunner:
    """The runner over one model, pool and backend."""
    return EagerRunner(parts.model, parts.kv, parts.attention)
