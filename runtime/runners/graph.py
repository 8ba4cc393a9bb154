"""Replays captured decode steps. Generic over the mechanism (CUDA graphs, CPU graphs): buckets,
padding, static inputs, metadata refreshed outside the graph, and typed reasons are the same for
all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..attention.backend import CapturableAttention, CapturedAttention
from ..forward_batch import ForwardBatch
from ..forward_mode import ForwardMode
from ..graphs.mechanism import CapturedGraph, Forward, GraphMechanism
from ..logits import Logits
from .runner import Reason, RunnerParts
from .static_batch import StaticBatch

MOST_PADDING = 2
"""A graph more than so many times the batch's size costs more than it saves."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    """One captured batch size."""

    static: StaticBatch
    attention: CapturedAttention
    graph: CapturedGraph
    outputs: dict[int, Logits] = field(default_factory=dict)  # of its first rows, by their number

    def first(self, rows: int) -> Logits:
        """The live rows of what a replay wrote; its place never changes."""
        if rows not in self.outputs:
            self.outputs[rows] = Logits(*self.graph.outputs).first(rows)
        return self.outputs[rows]

    def inputs(self) -> tuple[torch.Tensor, ...]:
        return (*self.static.inputs(), *self.attention.inputs())


class GraphRunner:
    """Runs decode batches of up to the largest captured size."""

    mode = ForwardMode.DECODE

    def __init__(self, name: str, mechanism: GraphMechanism, parts: RunnerParts) -> None:
        self.name = name
        self.mechanism = mechanism
        self._parts = parts
        self._buckets: dict[int, _Bucket] = {}  # by rows
        self._sizes: list[int] = []  # captured, smallest first
        self._largest_wanted = max(parts.capture_sizes, default=0)

    @property
    def wanted(self) -> tuple[int, ...]:
        """Sizes to capture, largest first: later ones fit into the pool of the first."""
        return tuple(sorted(self._parts.capture_sizes, reverse=True))

    @property
    def captured(self) -> tuple[int, ...]:
        """Sizes that there are graphs of, largest first."""
        return tuple(reversed(self._sizes))

    @property
    def num_bytes(self) -> int:
        """Bytes of pool and graphs."""
        return self.mechanism.num_bytes + sum(b.graph.num_bytes for b in self._buckets.values())

    def covers(self, size: int) -> bool:
        """Whether a captured graph computes no more than one of that size would."""
        return not self.mechanism.pads and bool(self.captured) and size <= self.captured[0]

    @torch.inference_mode()
    def capture(self, size: int) -> None:
        """Capture one size. Raises CaptureError, or what the device raises when memory is gone."""
        static = self._static(size)
        batch = static.batch(self.mode)
        backend, model, kv = self._parts.attention, self._parts.model, self._parts.kv
        assert isinstance(backend, CapturableAttention), "a plan pairs graphs with such backends"
        attention = backend.prepare_capture(batch)
        attention.use()

        def forward() -> Sequence[torch.Tensor]:
            return model.forward(batch, kv, backend).tensors()

        inputs = (*static.inputs(), *attention.inputs())
        graph = capture(self.mechanism, forward, size, inputs, is_breakable=False)
        self._buckets[size] = _Bucket(static, attention, graph)
        self._sizes = sorted(self._buckets)

    def why_not(self, batch: ForwardBatch) -> Reason | None:
        """None for a decode batch that a graph fits."""
        rows = batch.num_rows
        if not self._sizes or rows > self._sizes[-1]:
            dropped = rows <= self._largest_wanted
            return Reason.BUCKET_DROPPED if dropped else Reason.ABOVE_LARGEST_BUCKET
        if self.mechanism.pads and self._size_for(rows) > MOST_PADDING * rows:
            return Reason.PADDED_TOO_MUCH
        return None

    def run(self, batch: ForwardBatch) -> Logits:
        """Logits float32 [R, V], valid until the next run."""
        if batch.numbers is not None and self.mechanism.reads_memory:
            return self._run(batch)  # no torch operation runs that inference mode would matter to
        with torch.inference_mode():
            return self._run(batch)

    def _run(self, batch: ForwardBatch) -> Logits:
        rows = batch.num_rows
        bucket = self._buckets[self._size_for(rows)]
        bucket.static.fill(batch)
        bucket.attention.refresh(batch)
        bucket.graph.replay(rows, bucket.inputs())
        logits = bucket.first(rows)
        return logits if batch.num_logits == rows else logits.rows(batch.logits_rows)

    def _size_for(self, rows: int) -> int:
        return self._sizes[bisect_left(self._sizes, rows)]

    def _static(self, size: int) -> StaticBatch:
        return StaticBatch(
            tokens=size,
            rows=size,
            max_pages=self._parts.max_pages,
            page_size=self._parts.kv.page_size,
            device=self._parts.context.device,
            by_memory=self.mechanism.reads_memory,
        )


def capture(
    mechanism: GraphMechanism,
    forward: Forward,
    rows: int,
    inputs: Sequence[torch.Tensor],
    *,
    is_breakable: bool,
) -> CapturedGraph:
    """Warm up and capture one forward pass; nothing of a failed capture stays open."""
    mechanism.warm_up(forward, is_breakable=is_breakable)
    mechanism.begin(rows, inputs, is_breakable=is_breakable)
    try:
        return mechanism.end(forward())
    except BaseException:
        mechanism.abandon()
        raise
