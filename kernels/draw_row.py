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


def draw_row(
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
    least = _least_weight(logits_V, best, temperature, top_k, top_p, min_p)
    low = best + temperature * (log(least / ONE) - _SLACK)
    ids_C = np.flatnonzero(logits_V >= low)
    is_compact = 2 * len(ids_C) < size  # else to copy what is left costs more than it saves
    left = logits_V[ids_C] if is_compact else logits_V
    weights_C = _weigh(left, best, temperature)
    floor = _floor(weights_C, top_k, top_p, min_p)
    if floor > 1.0:
        weights_C *= weights_C >= floor
    at = _pick(weights_C, uniform)
    return int(ids_C[at]) if is_compact else at


def _least_weight(
    logits_V: np.ndarray, best: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> int:
    """A bound that the filters keep nothing below; at least 1.

    min_p sees what top_p has left, and top_p must see all that top_k has left.
    """
    least = 1
    if top_k:
        kth = float(np.partition(logits_V, -top_k)[-top_k])
        with np.errstate(over="ignore"):
            score = float(np.float64(kth - best) / temperature)
        least = max(least, int(exp(score) * ONE) - 1)  # other logits may weigh the same
    if min_p and top_p >= 1.0:
        least = max(least, int(min_p * ONE))
    return least


def _weigh(logits_C: np.ndarray, best: float, temperature: float) -> np.ndarray:
    """What `weigh` gives, as float64; by torch's exponential: numpy's differs in the last bit."""
    scores_C = np.subtract(logits_C, best, dtype=np.float64)
    if temperature != 1.0:
        with np.errstate(over="ignore"):
            scores_C /= temperature
    torch.exp(torch.from_numpy(scores_C), out=torch.from_numpy(scores_C))
    scores_C *= ONE
    return np.trunc(scores_C, out=scores_C)


def _floor(weights_C: np.ndarray, top_k: int, top_p: float, min_p: float) -> float:
    """The lightest weight that all filters keep."""
    floor = 0.0
    if 0 < top_k < len(weights_C):
        floor = float(np.partition(weights_C, -top_k)[-top_k])
    if top_p < 1.0:
        kept = weights_C[weights_C >= floor] if floor > 1.0 else weights_C
        total = int(kept.sum())
        needed = min(max(ceil(total * top_p), 1), total)
        floor = max(floor, _lightest_needed(kept, needed))
    return max(floor, float(int(min_p * ONE)))


def _lightest_needed(weights_C: np.ndarray, needed: float) -> float:
    """The largest weight such that all weights of at least it add up to `needed`."""
    if len(weights_C) > _SORTED:
        bins_C = np.maximum((weights_C.view(np.int64) >> _BIN_SHIFT) - _FIRST_BIN, 0)
        sums = np.bincount(bins_C, weights=weights_C)[::-1]  # heaviest first
        reached = sums.cumsum()
        at = int(reached.searchsorted(needed))
        needed -= reached[at] - sums[at]
        weights_C = weights_C[bins_C == len(sums) - 1 - at]
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
