"""Log-probabilities of chosen tokens and their likeliest rivals, for answers and for prompts.

They are natural logarithms of the model's own distribution: before penalties, bias, temperature and
filters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .request import TokenLogprob

_PROMPT_BLOCK = 64  # prompt positions at a time, which bounds the extra memory


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """The numbers of R rows, still on the device."""

    token_ids_R: Tensor
    logprobs_R: Tensor
    ranks_R: Tensor
    top_ids_RK: Tensor
    top_logprobs_RK: Tensor
    num_top: tuple[int, ...]  # how many of K each row asked for

    def to_host(self) -> list[TokenLogprob]:
        """One TokenLogprob a row; equally likely rivals in order of their ids."""
        return [
            _token_logprob(*values)
            for values in zip(
                self.token_ids_R.tolist(),
                self.logprobs_R.tolist(),
                self.ranks_R.tolist(),
                self.top_ids_RK.tolist(),
                self.top_logprobs_RK.tolist(),
                self.num_top,
                strict=True,
            )
        ]


def row_logprobs(logits_RV: Tensor, token_ids_R: Tensor, num_top: Sequence[int]) -> RowLogprobs:
    """The numbers of `token_ids_R` and of the `num_top` likeliest tokens of each row."""
    logprobs_RV = logits_RV.float().log_softmax(dim=-1)
    chosen_R1 = logprobs_RV.gather(1, token_ids_R.unsqueeze(1))
    ranks_R = (logprobs_RV > chosen_R1).sum(dim=1) + 1
    num_top = tuple(min(k, logits_RV.shape[1]) for k in num_top)
    top = logprobs_RV.topk(max(num_top, default=0), dim=1)
    return RowLogprobs(token_ids_R, chosen_R1.squeeze(1), ranks_R, top.indices, top.values, num_top)


def prompt_logprobs(
    logits_TV: Tensor, target_ids: Sequence[int], num_top: int
) -> list[TokenLogprob]:
    """The numbers of `target_ids[t]`, the token that followed position t, for every row t."""
    targets_T = torch.tensor(target_ids, dtype=torch.int64, device=logits_TV.device)
    found = list[TokenLogprob]()
    for logits, targets in zip(
        logits_TV.split(_PROMPT_BLOCK), targets_T.split(_PROMPT_BLOCK), strict=True
    ):
        found += row_logprobs(logits, targets, [num_top] * len(targets)).to_host()
    return found


def _token_logprob(
    token_id: int,
    logprob: float,
    rank: int,
    top_ids: list[int],
    top_logprobs: list[float],
    num_top: int,
) -> TokenLogprob:
    top = list(zip(top_ids[:num_top], top_logprobs[:num_top], strict=True))
    if rank <= num_top and token_id not in top_ids[:num_top]:
        top[-1] = (token_id, logprob)  # as likely as the last of the list: the chosen one is shown
    top.sort(key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprob(token_id=token_id, logprob=logprob, rank=rank, top=tuple(top))
