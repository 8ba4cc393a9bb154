"""What a forward pass says of the next tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from ..kernels.transfer import host_view


@dataclass(frozen=True, slots=True)
class HostLogits:
    """The same memory as numpy and Python see it."""

    values: np.ndarray  # float32 [R, V]
    numbers: memoryview[Any]  # floats: one number of it: without a call into torch or numpy
    best: memoryview[int] | None


@dataclass(slots=True, eq=False)
class Logits:
    """Logits of R rows over a vocabulary of V, and where the largest stand if the pass has seen."""

    values: Tensor  # float32 [R, V]
    best: Tensor | None = None  # int64 [R]: the first of each row's largest, or of its NaNs
    _host: HostLogits | None = field(default=None, init=False, repr=False)

    def on_host(self) -> HostLogits:
        """Views of logits that a CPU computed, made once: a graph writes to the same place again,
        and the first call into torch after a forward pass has emptied the caches takes 100 us.
        """
        if self._host is None:
            values = self.values.numpy()
            best = None if self.best is None else host_view(self.best)
            self._host = HostLogits(values, values.data, best)
        return self._host

    def tensors(self) -> tuple[Tensor, ...]:
        """What a graph has to keep."""
        return (self.values,) if self.best is None else (self.values, self.best)

    def first(self, num_rows: int) -> Logits:
        """The first rows, in the same memory."""
        best = None if self.best is None else self.best[:num_rows]
        return Logits(self.values[:num_rows], best)

    def rows(self, index: Tensor) -> Logits:
        """Some rows, copied, by int64 index on the same device."""
        best = None if self.best is None else self.best.index_select(0, index)
        return Logits(self.values.index_select(0, index), best)
