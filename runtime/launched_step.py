"""A step that has been given to the device and whose tokens are not yet known on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..kernels.transfer import to_device
from .logits import Logits
from .logprobs import RowLogprobs, prompt_logprobs
from .request import TokenLogprob
from .sampler import NoToken, Sampled, Sampler
from .scheduler import RequestState, ScheduledRow

Drawn = tuple[int, TokenLogprob | None] | NoToken
"""What sampling gave one row: a token, with its log-probability where asked, or why it has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSize:
    """What the last step computed and how long it took; the raw material of measured rates."""

    num_tokens: int  # of all its rows
    is_decode: bool  # one token a row
    seconds: float


@dataclass(slots=True)
class LaunchedStep:
    """Not frozen for the reason that `RequestOutput` is not."""

    rows: list[ScheduledRow]
    began: float  # monotonic, seconds
    sampled: Sampled | None  # None: no row draws
    scores: list[tuple[ScheduledRow, RowLogprobs]]  # of the prompt tokens of rows that asked

    @classmethod
    def sample(
        cls,
        rows: list[ScheduledRow],
        logits: Logits,
        num_logits: int,
        sampler: Sampler,
        began: float,
    ) -> LaunchedStep:
        """Draw a token for each row that samples; compute prompt log-probabilities."""
        scores: list[tuple[ScheduledRow, RowLogprobs]] = []
        sampling: list[RequestState] = []
        wanted: list[int] = []
        offset = 0
        for row in rows:
            if scored := row.num_prompt_logits:
                scores.append((row, _prompt_scores(row, logits.values[offset : offset + scored])))
                offset += scored
            if row.samples:
                row.draw = len(sampling)
                sampling.append(row.state)
                wanted.append(offset)
                offset += 1
        if not sampling:
            return cls(rows, began, None, scores)
        if len(wanted) < num_logits:
            logits = logits.rows(to_device(torch.tensor(wanted), logits.values.device))
        sampled = sampler.sample(logits, sampling)
        return cls(rows, began, sampled, scores)

    def drawn(self) -> list[Drawn]:
        """What each draw came to, once the device is done. RuntimeError when that failed."""
        if self.sampled is None:
            return []
        drawn: list[Drawn] = list(zip(*self.sampled.to_host(), strict=True))
        for i, reason in self.sampled.failed_rows().items():
            drawn[i] = reason
        return drawn

    def size(self, seconds: float) -> StepSize:
        """How much it computed, in how long."""
        counts = [row.num_tokens for row in self.rows]
        return StepSize(
            num_tokens=sum(counts),
            is_decode=counts.count(1) == len(counts),
            seconds=seconds,
        )


def _prompt_scores(row: ScheduledRow, logits: torch.Tensor) -> RowLogprobs:
    """Log-probabilities of the prompt tokens after those of `logits`."""
    state, k = row.state, row.state.sampling.prompt_logprobs
    assert k is not None, "only a request that asks has prompt logits"
    first = state.num_computed + 1
    return prompt_logprobs(logits, state.token_ids[first : first + len(logits)], k)
