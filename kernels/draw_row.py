"""The draw of draw.py for one row on a CPU: the same token, for a part of the work.

Weights are whole numbers. So tokens that weigh nothing, or that a filter drops for certain, are
left out before any exponential is taken, and sums are exact in whatever order is fastest. The plain
twin is `draw_filtered`. Shapes: V vocabulary, C tokens that are left, in order of their ids.
"""

from __future__ import annotations

from math import ceil, exp, log

import numpy as np
import torch

from .draw import ONE

_SLACK = 1e-6  # of logits over temperature: far more than rounding moves a bound
_BLOCK = 256  # weights summed at a time in search of the drawn one
_SORTED = 2048  # so many are sorted at once
_BIN_SHIFT = 46  # of a float64's bits: leaves its exponent and 64 bins for each
_FIRST_BIN = 1023 << (52 - _BIN_SHIFT)  # of weight 1


class RowDraw:
    """Draws from rows of one vocabulary, in memory of its own: to allocate half a megabyte anew for
    every array would take longer than all the arithmetic.
    """

    def __init__(self, vocab_size: int) -> None:
        self._logits_V = np.empty(vocab_size, dtype=np.float32)
        self._weights_V = np.empty(vocab_size, dtype=np.float64)
        self._bins_V = np.empty(vocab_size, dtype=np.int64)
        self._mask_V = np.empty(vocab_size, dtype=np.bool_)

    def draw(
        self,
        logits_V: np.ndarray,  # float32
        best: float,
        temperature: float,
        uniform: float,
        *,
        top_k: int,
        top_p: float,
        min_p: float,
    ) -> int:
        """The drawn token; `best` is the largest logit and finite, and none is NaN."""
        size = len(logits_V)
        top_k = top_k if top_k < size else 0
        least = 1  # a weight that the filters keep nothing below
        if top_k:
            least = self._least_of_top_k(logits_V, best, temperature, top_k)
        if min_p and top_p >= 1.0:  # top_p, which is first, must see what min_p will drop
            least = max(least, int(min_p * ONE))
        low = best + temperature * (log(least / ONE) - _SLACK)
        mask_V = np.greater_equal(logits_V, low, out=self._mask_V)
        if 2 * np.count_nonzero(mask_V) > size:  # a copy of what is left costs more than it saves
            return self._draw(logits_V, best, temperature, uniform, top_k, top_p, min_p)
        ids_C = np.flatnonzero(mask_V)
        at = self._draw(logits_V[ids_C], best, temperature, uniform, top_k, top_p, min_p)
        return int(ids_C[at])

    def _draw(
        self,
        logits_C: np.ndarray,
        best: float,
        temperature: float,
        uniform: float,
        top_k: int,
        top_p: float,
        min_p: float,
    ) -> int:
        """Where in `logits_C` the drawn token is."""
        weights_C = self._weigh(logits_C, best, temperature)
        if 0 < top_k < len(weights_C):
            self._zero_below(weights_C, float(np.partition(weights_C, -top_k)[-top_k]))
        if top_p < 1.0:
            total = int(weights_C.sum())
            needed = min(max(ceil(total * top_p), 1), total)
            self._zero_below(weights_C, self._lightest_needed(weights_C, needed))
        self._zero_below(weights_C, int(min_p * ONE))
        return _pick(weights_C, uniform)

    def _least_of_top_k(
        self, logits_V: np.ndarray, best: float, temperature: float, top_k: int
    ) -> int:
        """A weight that the k-th heaviest has at least, and so has each that weighs the same."""
        np.copyto(self._logits_V, logits_V)
        self._logits_V.partition(len(logits_V) - top_k)
        kth = float(self._logits_V[-top_k])
        score = (kth - best) / temperature if kth > best - 100.0 * temperature else -100.0
        return max(1, int(exp(score) * ONE) - 1)

    def _weigh(self, logits_C: np.ndarray, best: float, temperature: float) -> np.ndarray:
        """What `weigh` gives, as float64; by torch's exponential: numpy's differs in the last
        bit.
        """
        scores_C = self._weights_V[: len(logits_C)]
        np.subtract(logits_C, best, out=scores_C, dtype=np.float64)
        if temperature != 1.0:
            with np.errstate(over="ignore"):
                scores_C /= temperature
        scores = torch.from_numpy(scores_C)
        torch.exp(scores, out=scores)
        scores_C *= ONE
        return np.trunc(scores_C, out=scores_C)

    def _zero_below(self, weights_C: np.ndarray, floor: float) -> None:
        if floor > 1:
            weights_C *= np.greater_equal(weights_C, floor, out=self._mask_V[: len(weights_C)])

    def _lightest_needed(self, weights_C: np.ndarray, needed: float) -> float:
        """The largest weight such that all weights of at least it add up to `needed`."""
        if len(weights_C) > _SORTED:
            bins_C = self._bins_V[: len(weights_C)]
            np.right_shift(weights_C.view(np.int64), _BIN_SHIFT, out=bins_C)
            np.maximum(bins_C, _FIRST_BIN, out=bins_C)
            bins_C -= _FIRST_BIN
            sums = np.bincount(bins_C, weights=weights_C)[::-1]  # heaviest first
            reached = sums.cumsum()
            at = int(reached.searchsorted(needed))
            needed -= reached[at] - sums[at]
            there_C = np.equal(bins_C, len(sums) - 1 - at, out=self._mask_V[: len(weights_C)])
            weights_C = weights_C[there_C]
        heaviest = np.sort(weights_C)[::-1]
        return float(heaviest[heaviest.cumsum().searchsorted(needed)])


def _pick(weights_C: np.ndarray, uniform: float) -> int:
    """Where the cumulated weights pass `uniform` of their sum."""
    sums = np.add.reduceat(weights_C, np.arange(0, len(weights_C), _BLOCK))
    reached = sums.cumsum()
    total = int(reached[-1])
    target = min(int(uniform * total), total - 1)
    block = int(reached.searchsorted(target, side="right"))
    inside = weights_C[block * _BLOCK : (block + 1) * _BLOCK].cumsum()
    rest = target - (reached[block] - sums[block])
    return block * _BLOCK + int(inside.searchsorted(rest, side="right"))
