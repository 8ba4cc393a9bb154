"""The draw of draw.py for one row whose filters keep few tokens: the same token for less work.

Its plain twin is `draw_filtered` over the whole row. Shapes: V vocabulary, C candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .draw import ONE, draw, share_of, weigh

NUM_CANDIDATES = 256


def draw_likeliest(
    logits_1V: Tensor,
    best_1: Tensor,
    temperature_1: Tensor,
    uniform_1: Tensor,
    *,
    top_k: int,
    top_p: float,
    min_p: float,
) -> Tensor | None:
    """The drawn token [1], or None when the filters may keep more than the likeliest C tokens.

    Reads values on the host, so it is for CPUs.
    """
    size = logits_1V.shape[1]
    top_k = top_k if top_k < size else 0
    if size <= NUM_CANDIDATES or top_k > NUM_CANDIDATES or not (top_k or top_p < 1.0 or min_p):
        return None
    likeliest = logits_1V.topk(NUM_CANDIDATES, dim=1)
    weights_1C = weigh(likeliest.values, best_1, temperature_1)  # heaviest first
    lightest = int(weights_1C[0, -1])
    floor = int(weights_1C[0, top_k - 1]) if top_k else 0
    if top_p < 1.0:
        if top_k and floor <= lightest:  # ties with the k-th may lie beyond the candidates
            return None
        weights_1C = weights_1C * (weights_1C >= floor)
        total_11 = _total(logits_1V, best_1, temperature_1, weights_1C if top_k else None)
        reached = torch.searchsorted(weights_1C.cumsum(dim=1), share_of(total_11, top_p))
        if int(reached) == NUM_CANDIDATES:
            return None
        floor = max(floor, int(weights_1C[0, int(reached)]))
    floor = max(floor, int(min_p * ONE))
    if lightest >= floor:
        return None
    ids_1C, order_1C = likeliest.indices.sort(dim=1)
    kept_1C = (weights_1C * (weights_1C >= floor)).gather(1, order_1C)
    return ids_1C[0, draw(kept_1C, uniform_1)]


def _total(
    logits_1V: Tensor, best_1: Tensor, temperature_1: Tensor, kept_1C: Tensor | None
) -> Tensor:
    """The sum [1, 1] of what top_k kept, or of all tokens."""
    weights = weigh(logits_1V, best_1, temperature_1) if kept_1C is None else kept_1C
    return weights.sum(dim=1, keepdim=True)
