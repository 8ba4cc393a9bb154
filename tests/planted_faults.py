"""Faults of graph runners that every mechanism's tests plant and must see."""

from __future__ import annotations

import pytest

from polypath.runtime.forward_batch import ForwardBatch
from polypath.runtime.runners.graph import GraphRunner
from polypath.runtime.runners.static_batch import StaticBatch


def wrong_bucket(patch: pytest.MonkeyPatch) -> None:
    """Every batch goes to the graph of one row."""
    patch.setattr(GraphRunner, "_size_for", lambda self, rows: 1)


def padding_into_a_live_page(patch: pytest.MonkeyPatch) -> None:
    """Padding writes where the first token's keys and values are."""
    fill = StaticBatch.fill_tokens

    def fill_badly(self: StaticBatch, batch: ForwardBatch) -> None:
        fill(self, batch)
        self._slots[batch.num_tokens :] = batch.slots[0]

    patch.setattr(StaticBatch, "fill_tokens", fill_badly)


def moved_input(patch: pytest.MonkeyPatch) -> None:
    """A static input lies elsewhere than it did at the capture."""
    fill = StaticBatch.fill_tokens

    def move(self: StaticBatch, batch: ForwardBatch) -> None:
        fill(self, batch)
        self._positions = self._positions.clone()

    patch.setattr(StaticBatch, "fill_tokens", move)
