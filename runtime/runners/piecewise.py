"""Replays everything of a step but attention, which runs between the parts of the graph: for
batches whose attention cannot be captured, or changes shape with every step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..attention.backend import AttentionBackend
from ..forward_batch import ForwardBatch
from ..forward_mode import ForwardMode
from ..graphs.mechanism import CapturedGraph, GraphMechanism
from ..logits import Logits
from .graph import MOST_PADDING, capture
from .runner import Reason, RunnerParts
from .static_batch import StaticBatch


class PiecewiseRunner:
    """Runs any batch of up to the largest captured number of tokens. Logits are computed after the
    graph, for the rows that need them.
    """

    mode = ForwardMode.MIXED

    def __init__(
        self, name: str, mechanism: GraphMechanism, parts: RunnerParts, sizes: Sequence[int]
    ) -> None:
        self.name = name
        self.mechanism = mechanism
        self.wanted = tuple(sorted(sizes, reverse=True))
        self._parts = parts
        self._graphs: dict[int, tuple[StaticBatch, CapturedGraph]] = {}  # by tokens

    @property
    def captured(self) -> tuple[int, ...]:
        """Sizes in tokens that there are graphs of, largest first."""
        return tuple(sorted(self._graphs, reverse=True))

    @property
    def num_bytes(self) -> int:
        """Bytes of pool and graphs."""
        return self.mechanism.num_bytes + sum(g.num_bytes for _, g in self._graphs.values())

    def covers(self, size: int) -> bool:
        """Whether a captured graph computes no more than one of that size would."""
        return not self.mechanism.pads and bool(self.captured) and size <= self.captured[0]

    @torch.inference_mode()
    def capture(self, size: int) -> None:
        """Capture one number of tokens. Raises CaptureError, or what the device raises."""
        parts = self._parts
        static = StaticBatch(
            tokens=size,
            rows=1,
            max_pages=1,
            page_size=parts.kv.page_size,
            device=parts.context.device,
            by_memory=self.mechanism.reads_memory,
        )
        batch = static.batch(self.mode)
        attention = _BetweenParts(parts.attention, self.mechanism)

        def warm_up_and_capture() -> Sequence[torch.Tensor]:
            return parts.model.layers(batch, parts.kv, attention)

        graph = capture(
            self.mechanism, warm_up_and_capture, size, static.token_inputs(), is_breakable=True
        )
        self._graphs[size] = static, graph

    def why_not(self, batch: ForwardBatch) -> Reason | None:
        """None for a batch whose tokens fit a graph."""
        tokens = batch.num_tokens
        fitting = [size for size in self._graphs if size >= tokens]
        if not fitting:
            dropped = bool(self.wanted) and tokens <= self.wanted[0]
            return Reason.BUCKET_DROPPED if dropped else Reason.ABOVE_LARGEST_BUCKET
        if self.mechanism.pads and min(fitting) > MOST_PADDING * tokens:
            return Reason.PADDED_TOO_MUCH
        return None

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> Logits:
        """Logits float32 [R, V]."""
        tokens = batch.num_tokens
        static, graph = self._graphs[min(size for size in self._graphs if size >= tokens)]
        static.fill_tokens(batch)
        self._parts.attention.plan(batch)
        graph.replay(tokens, static.token_inputs())
        x, residual = graph.outputs
        return self._parts.model.logits(x[:tokens], residual[:tokens], batch.logits_rows)


class _BetweenParts:
    """Attention as a break: planned anew for every batch, it reads the graph's queries and writes
    into the graph's tensor.
    """

    def __init__(self, backend: AttentionBackend, mechanism: GraphMechanism) -> None:
        self.name = backend.name
        self._backend = backend
        self._mechanism = mechanism

    def plan(self, batch: ForwardBatch) -> None:
        """The runner plans the backend itself."""

    def attend(self, q_TND: torch.Tensor, kv_layer: torch.Tensor, layer: int) -> torch.Tensor:
        """A tensor [T, N, D] that a replay fills."""
        out_TND = torch.empty_like(q_TND)
        queries, attended = self._mechanism.weak(q_TND), self._mechanism.weak(out_TND)

        def attend_live(rows: int) -> None:
            if rows:
                attended[:rows] = self._backend.attend(queries[:rows], kv_layer, layer)
            if self._mechanism.pads:
                attended[rows:] = 0  # else a NaN there could reach the scratch page

        self._mechanism.break_(attend_live, [q_TND], [out_TND])
        return out_TND
