"""Log-probabilities of chosen tokens and their likeliest rivals, for answers and for prompts.

They are natural logarithms of the model's own distribution: before penalties, bias, temperature and
filters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.transfer import Arriving, to_device
from .request import TokenLogprob

_ROWS_AT_ONCE = {"cpu": 4}  # these stay in a CPU's cache, and in memory it has touched before


class RowLogprobs:
    """The numbers of R rows, on their way to the host: token ids, log-probabilities and ranks [R],
    ids and log-probabilities of the likeliest tokens [R, K].
    """

    def __init__(self, tensors: Sequence[Tensor], num_top: tuple[int, ...]) -> None:
        self._arriving = Arriving(*tensors)
        self._num_top = num_top  # how many of K each row asked for

    def to_host(self) -> list[TokenLogprob]:
        """One TokenLogprob a row; equally likely rivals in order of their ids."""
        columns = (tensor.tolist() for tensor in self._arriving.wait())
        return [_token_logprob(*values) for values in zip(*columns, self._num_top, strict=True)]


@torch.inference_mode()
def row_logprobs(logits_RV: Tensor, token_ids_R: Tensor, num_top: Sequence[int]) -> RowLogprobs:
    """The numbers of `token_ids_R` and of the `num_top` likeliest tokens of each row."""
    num_top = tuple(min(k, logits_RV.shape[1]) for k in num_top)
    block = _ROWS_AT_ONCE.get(logits_RV.device.type, 256)
    parts = [
        _block_logprobs(logits, token_ids, max(num_top, default=0))
        for logits, token_ids in zip(logits_RV.split(block), token_ids_R.split(block), strict=True)
    ]
    logprobs_R, ranks_R, top_ids_RK, top_logprobs_RK = map(torch.cat, zip(*parts, strict=True))
    numbers = (token_ids_R, logprobs_R, ranks_R, top_ids_RK, top_logprobs_RK)
    return RowLogprobs(numbers, num_top)


def _block_logprobs(
    logits_RV: Tensor, token_ids_R: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logprobs_RV = logits_RV.float().log_softmax(dim=-1)
    chosen_R1 = logprobs_RV.gather(1, token_ids_R.unsqueeze(1))
    ranks_R = (logprobs_RV > chosen_R1).sum(dim=1) + 1
    top = logprobs_RV.topk(num_top, dim=1)
    return chosen_R1.squeeze(1), ranks_R, top.indices, top.values


def prompt_logprobs(logits_TV: Tensor, target_ids: Sequence[int], num_top: int) -> RowLogprobs:
    """The numbers of `target_ids[t]`, the token that followed position t, for every row t."""
    targets_T = to_device(torch.tensor(target_ids, dtype=torch.int64), logits_TV.device)
    return row_logprobs(logits_TV, targets_T, [num_top] * len(target_ids))


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
