"""What a request does to its own logits before a token is chosen: penalties, bias, no early end."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..kernels.transfer import to_device
from .request import SamplingParams


class SamplingRow(Protocol):
    """What one row of logits needs to become a token: a `RequestState`, read as it is, since a copy
    for each row and step costs more than the step's other work.
    """

    @property
    def sampling(self) -> SamplingParams: ...

    @property
    def token_ids(self) -> Sequence[int]:
        """The prompt, then what was generated."""
        ...

    @property
    def num_prompt(self) -> int: ...


def changes_logits(row: SamplingRow) -> bool:
    """Whether `adjust` would change this row."""
    params = row.sampling
    return bool(
        params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
        or (params.min_tokens and len(row.token_ids) - row.num_prompt < params.min_tokens)
    )


def counts_tokens(row: SamplingRow) -> bool:
    """Whether `adjust` reads which tokens were generated, not only how many."""
    params = row.sampling
    return bool(
        params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
    )


@torch.inference_mode()
def adjust(logits_RV: Tensor, rows: Sequence[SamplingRow], end_ids: Sequence[int]) -> None:
    """Change the rows of `logits_RV` in place; rows that ask for nothing stay untouched.

    The order is repetition, presence and frequency, bias, min_tokens. Repetition looks at prompt
    and generated tokens and follows transformers (a positive logit is divided, another
    multiplied); presence and frequency look at generated tokens only.
    """
    for logits_V, row in zip(logits_RV, rows, strict=True):
        if changes_logits(row):
            _repetition(logits_V, row)
            _presence_and_frequency(logits_V, row)
            _bias(logits_V, row)
            _forbid_early_end(logits_V, row, end_ids)


def _repetition(logits_V: Tensor, row: SamplingRow) -> None:
    penalty = row.sampling.repetition_penalty
    if penalty != 1.0:
        seen = _tensor(row.token_ids).to(logits_V.device)
        value = logits_V[seen]
        logits_V[seen] = torch.where(value > 0, value / penalty, value * penalty)


def _presence_and_frequency(logits_V: Tensor, row: SamplingRow) -> None:
    presence, frequency = row.sampling.presence_penalty, row.sampling.frequency_penalty
    output_ids = row.token_ids[row.num_prompt :] if presence or frequency else ()
    if output_ids:
        ids, counts = _tensor(output_ids).unique(return_counts=True)
        penalty = presence + frequency * counts.double()
        logits_V[ids.to(logits_V.device)] -= penalty.to(logits_V)


def _bias(logits_V: Tensor, row: SamplingRow) -> None:
    bias = {i: b for i, b in row.sampling.logit_bias.items() if 0 <= i < len(logits_V)}
    if bias:
        ids = to_device(torch.tensor(list(bias)), logits_V.device)
        values = torch.tensor(list(bias.values()), dtype=logits_V.dtype)
        logits_V[ids] += to_device(values, logits_V.device)


def _forbid_early_end(logits_V: Tensor, row: SamplingRow, end_ids: Sequence[int]) -> None:
    if len(row.token_ids) - row.num_prompt < row.sampling.min_tokens:
        ends = {i for i in (*end_ids, *row.sampling.stop_token_ids) if 0 <= i < len(logits_V)}
        where = to_device(torch.tensor(sorted(ends), dtype=torch.int64), logits_V.device)
        logits_V.index_fill_(0, where, -torch.inf)


def _tensor(ids: Sequence[int]) -> Tensor:
    """int64; for thousands of ids several times faster than torch.tensor."""
    return torch.frombuffer(array("q", ids), dtype=torch.int64) if ids else torch.empty(0).long()
