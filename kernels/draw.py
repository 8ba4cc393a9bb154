"""Filtered drawing from logits in whole numbers, so that no order of summation can change a token.

Each probability becomes an integer weight, relative to the row's likeliest token (2**30 - 1), so
what is less than a billionth as likely is never drawn. Sums of integers are exact in any order: a
row's draw is the same alone and in any batch. Shapes: R rows, V vocabulary, D digit values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .transfer import to_device

_DIGIT_BITS = 15
_DIGITS = 1 << _DIGIT_BITS
ONE = (
    _DIGITS * _DIGITS - 1
)  # weight of the likeliest token: two digits; sums of 2**23 tokens are exact in float64


def weigh(logits_RV: Tensor, best_R: Tensor, temperature_R: Tensor) -> Tensor:
    """Integer weights [R, V] of softmax(logits / temperature); `best_R`: largest logits."""
    scores_RV = logits_RV.double()
    scores_RV -= best_R.unsqueeze(1)
    scores_RV /= temperature_R.unsqueeze(1)
    return scores_RV.exp_().mul_(ONE).to(torch.int64)


def keep_top_k(weights_RV: Tensor, top_k_R: list[int]) -> Tensor:
    """Zero all but the k heaviest of each row; 0 keeps all, and so are ties with the k-th kept."""
    size = weights_RV.shape[1]
    wanted = [k if 0 < k < size else 0 for k in top_k_R]
    if not any(wanted):
        return weights_RV
    k_R1 = to_device(torch.tensor(wanted), weights_RV.device).unsqueeze(1)
    heaviest = weights_RV.topk(max(wanted), dim=1).values
    floor_R1 = heaviest.gather(1, (k_R1 - 1).clamp(min=0))
    return _at_least(weights_RV, floor_R1.where(k_R1 > 0, 0))


def keep_top_p(weights_RV: Tensor, top_p_R: list[float]) -> Tensor:
    """Zero all but the fewest heaviest that hold `top_p` of what is left of each row.

    Ties with the last of them are kept.
    """
    if all(p >= 1.0 for p in top_p_R):
        return weights_RV
    top_p_R1 = _column(top_p_R, weights_RV.device)
    needed_R1 = share_of(weights_RV.sum(dim=1, keepdim=True), top_p_R1)
    floor_R1 = _lightest_needed(weights_RV, needed_R1)
    return _at_least(weights_RV, floor_R1.where(top_p_R1 < 1.0, 0))


def share_of(total_R1: Tensor, share: Tensor | float) -> Tensor:
    """The whole number that a share of `total_R1` comes to, at least 1 and at most all."""
    return (total_R1.double() * share).ceil().to(torch.int64).clamp(min=1).minimum(total_R1)


def keep_min_p(weights_RV: Tensor, min_p_R: list[float]) -> Tensor:
    """Zero what is less likely than `min_p` times the likeliest."""
    if not any(min_p_R):
        return weights_RV
    floor_R1 = (_column(min_p_R, weights_RV.device) * ONE).floor().to(torch.int64)
    return _at_least(weights_RV, floor_R1)


def draw(weights_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """The token of each row at `uniform_R` (float64 in [0, 1)) of its cumulated weights.

    Tokens lie in order of their ids. Never one of weight zero, unless the whole row is zero.
    """
    cumulated_RV = weights_RV.cumsum(dim=1)
    total_R = cumulated_RV[:, -1]
    target_R = (uniform_R * total_R).to(torch.int64).minimum(total_R - 1)
    found_R1 = torch.searchsorted(cumulated_RV, target_R.unsqueeze(1), right=True)
    return found_R1.squeeze(1).clamp_(max=weights_RV.shape[1] - 1)


def draw_filtered(
    logits_RV: Tensor,
    best_R: Tensor,
    temperature_R: Tensor,
    uniform_R: Tensor,
    *,
    top_k_R: list[int],
    top_p_R: list[float],
    min_p_R: list[float],
) -> Tensor:
    """One token a row [R].

    Filters run in transformers' order, each on what the one before left: top_k, top_p, min_p.
    """
    weights_RV = weigh(logits_RV, best_R, temperature_R)
    weights_RV = keep_top_k(weights_RV, top_k_R)
    weights_RV = keep_top_p(weights_RV, top_p_R)
    return draw(keep_min_p(weights_RV, min_p_R), uniform_R)


def _at_least(weights_RV: Tensor, floor_R1: Tensor) -> Tensor:
    return weights_RV * (weights_RV >= floor_R1)


def _column(values_R: list[float], device: torch.device) -> Tensor:
    return to_device(torch.tensor(values_R, dtype=torch.float64), device).unsqueeze(1)


def _lightest_needed(weights_RV: Tensor, needed_R1: Tensor) -> Tensor:
    """The largest weight [R, 1] such that all weights of at least it add up to `needed_R1`.

    A radix select of two digits: no sort, no wait for the device.
    """
    upper_RV = (weights_RV >> _DIGIT_BITS) & (_DIGITS - 1)  # in range even for a row of NaN
    upper_R1, missing_R1 = _digit_reaching(upper_RV, weights_RV, needed_R1)
    lower_RV = weights_RV & (_DIGITS - 1)
    lower_R1, _ = _digit_reaching(lower_RV, weights_RV * (upper_RV == upper_R1), missing_R1)
    return (upper_R1 << _DIGIT_BITS) + lower_R1


def _digit_reaching(
    digits_RV: Tensor, weights_RV: Tensor, needed_R1: Tensor
) -> tuple[Tensor, Tensor]:
    """The digit at which the weights, summed from the largest digit down, reach `needed_R1`.

    Also what that digit's own weights have to give.
    """
    sums_RD = weights_RV.new_zeros(weights_RV.shape[0], _DIGITS)
    sums_RD = sums_RD.scatter_add_(1, digits_RV, weights_RV).flip(1)
    reached_RD = sums_RD.cumsum(dim=1)
    at_R1 = torch.searchsorted(reached_RD, needed_R1).clamp_(max=_DIGITS - 1)
    missing_R1 = needed_R1 - (reached_RD.gather(1, at_R1) - sums_RD.gather(1, at_R1))
    return _DIGITS - 1 - at_R1, missing_R1
