"""From a batch's logits to its next tokens: each row by its own rules, blind to the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from ..kernels.draw import draw_filtered
from ..kernels.draw_likeliest import draw_likeliest
from ..kernels.philox import uniform
from ..kernels.row_max import row_max
from .logprobs import RowLogprobs, prompt_logprobs, row_logprobs
from .penalties import SamplingRow, adjust, changes_logits
from .request import TokenLogprob

__all__ = ["NoToken", "Sampled", "Sampler", "SamplingRow", "prompt_logprobs"]


class NoToken(StrEnum):
    """Why a row gave no token: the model's fault or the request's."""

    NOT_FINITE = "the model's logits are not finite; its weights may be damaged"
    FORBIDDEN = "the request's own logit_bias, penalties and min_tokens forbid every token"


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens of one step. They stay on the device until someone asks for them on the host."""

    token_ids: Tensor  # [B] int64
    is_sound: Tensor  # [B] bool: the model's own logits hold a finite best one and no NaN
    has_token: Tensor  # [B] bool: and so do they after what the request does to them
    logprob_rows: tuple[int, ...] = ()  # rows that asked for log-probabilities
    logprobs: RowLogprobs | None = None  # of `logprob_rows`

    def to_host(self) -> tuple[list[int], list[TokenLogprob | None]]:
        """Token ids and log-probabilities (None where not asked) of all rows."""
        found: list[TokenLogprob | None] = [None] * len(self.token_ids)
        if self.logprobs is not None:
            for row, logprob in zip(self.logprob_rows, self.logprobs.to_host(), strict=True):
                found[row] = logprob
        return self.token_ids.tolist(), found

    def failed_rows(self) -> dict[int, NoToken]:
        """Rows whose logits held NaN, +inf or nothing finite, and why; their token means
        nothing.
        """
        return {
            row: NoToken.FORBIDDEN if self.is_sound[row] else NoToken.NOT_FINITE
            for row, has_token in enumerate(self.has_token.tolist())
            if not has_token
        }


class Sampler:
    """Chooses the next token of every row. It keeps nothing between calls: all is in the rows."""

    def __init__(self, vocab_size: int, device: torch.device, eos_ids: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.eos_ids = tuple(eos_ids)
        # One row's float64 scores stay in a CPU's cache; a GPU wants all rows in one launch.
        self._rows_at_once = 1 if device.type == "cpu" else 1 << 30

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Sampled:
        """The next token of each row of `logits` [B, V], which stay unchanged.

        Greedy rows cost one argmax; only rows that ask for more pay for more.
        """
        assert logits.shape == (len(rows), self.vocab_size), (
            f"logits {tuple(logits.shape)} must be [{len(rows)} rows, {self.vocab_size} tokens]"
        )
        work = logits
        if any(map(changes_logits, rows)):
            work = logits.clone()
            adjust(work, rows, self.eos_ids)
        best, token_ids = row_max(work)
        is_sound = has_token = best.abs() < torch.inf  # not so for NaN either
        if work is not logits:
            is_sound = logits.amax(dim=1).abs() < torch.inf
            has_token = has_token & is_sound
        drawn = [i for i, row in enumerate(rows) if row.sampling.temperature]
        for start in range(0, len(drawn), self._rows_at_once):
            block = drawn[start : start + self._rows_at_once]
            where = torch.tensor(block, device=work.device)
            tokens = _draw_rows(work.index_select(0, where), best[where], [rows[i] for i in block])
            token_ids[where] = tokens.where(has_token[where], token_ids[where])
        asked, logprobs = _asked_logprobs(logits, rows, token_ids)
        return Sampled(token_ids, is_sound, has_token, asked, logprobs)

    def prompt_logprobs(
        self, logits: Tensor, target_ids: Sequence[int], k: int
    ) -> list[TokenLogprob]:
        """Of the T tokens that followed the rows of `logits` [T, V], with k rivals each."""
        return prompt_logprobs(logits, target_ids, k)


def _asked_logprobs(
    logits: Tensor, rows: Sequence[SamplingRow], token_ids: Tensor
) -> tuple[tuple[int, ...], RowLogprobs | None]:
    """Which rows asked for log-probabilities, and these."""
    asked = {i: k for i, row in enumerate(rows) if (k := row.sampling.logprobs) is not None}
    if not asked:
        return (), None
    if len(asked) < len(rows):
        where = torch.tensor(list(asked), device=logits.device)
        logits, token_ids = logits.index_select(0, where), token_ids[where]
    return tuple(asked), row_logprobs(logits, token_ids, list(asked.values()))


def _noise(row: SamplingRow) -> float:
    position = len(row.token_ids) - row.num_prompt
    return uniform(row.sampling.seed, row.sampling.choice, position)


def _draw_rows(logits: Tensor, best: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """One drawn token a row."""
    params = [row.sampling for row in rows]
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float64)
    noise = torch.tensor(
        [_noise(row) for row in rows],
        dtype=torch.float64,
    )
    given = logits, best, temperature.to(logits.device), noise.to(logits.device)
    if len(rows) == 1 and logits.device.type == "cpu":
        only = params[0]
        token = draw_likeliest(*given, top_k=only.top_k, top_p=only.top_p, min_p=only.min_p)
        if token is not None:
            return token
    return draw_filtered(
        *given,
        top_k_R=[p.top_k for p in params],
        top_p_R=[p.top_p for p in params],
        min_p_R=[p.min_p for p in params],
    )
