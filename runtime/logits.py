"""What a forward pass says of the next tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Logits:
    """Logits of R rows over a vocabulary of V, and where the largest stand if the pass has seen."""

    values: Tensor  # float32 [R, V]
    best: Tensor | None = None  # int64 [R]: the first of each row's largest, or of its NaNs

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
