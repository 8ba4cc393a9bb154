"""Sampling on the CPU that computed the logits: row by row, in caches, each at its own price.

A step of a small model takes milliseconds, and torch's small operations 10 to 30 us each after a
forward pass has emptied the caches: so greedy rows run none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from ..kernels.draw_row import RowDraw
from ..kernels.philox import uniform
from .logits import Logits
from .logprobs import row_logprobs
from .penalties import SamplingRow, adjust, changes_logits
from .request import TokenLogprob
from .sampler import NoToken, check_shape, draw_number


@dataclass(frozen=True, slots=True)
class HostSampled:
    """The tokens of one step, on the host already."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]
    failed: dict[int, NoToken] = field(default_factory=dict)

    @property
    def device_ids(self) -> Tensor:
        """Token ids int64 [B]."""
        return torch.tensor(self.token_ids, dtype=torch.int64)

    def to_host(self) -> tuple[list[int], list[TokenLogprob | None]]:
        """Token ids and log-probabilities of all rows."""
        return self.token_ids, self.logprobs

    def failed_rows(self) -> dict[int, NoToken]:
        """Rows without a token, and why."""
        return self.failed


class HostSampler:
    """See `Sampler`; its plain twin is `DeviceSampler`."""

    def __init__(self, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)
        self._row_draw = RowDraw(vocab_size)

    def sample(self, logits: Logits, rows: Sequence[SamplingRow]) -> HostSampled:
        """The next token of each row of `logits`, which stay unchanged."""
        host = logits.on_host()
        check_shape(host.numbers.shape or (), len(rows), self._vocab_size)
        # numpy compares whole vectors where torch 2 goes value by value, 10 times faster
        best = host.values.argmax(axis=1) if host.best is None else host.best
        token_ids: list[int] = best.tolist()
        failed: dict[int, NoToken] = {}
        for i, row in enumerate(rows):
            largest = host.numbers[i, token_ids[i]]  # NaN, where there is one
            if not isfinite(largest):
                failed[i] = NoToken.NOT_FINITE
            elif row.sampling.temperature or changes_logits(row):
                token = self._token(host.values[i], token_ids[i], largest, row)
                if isinstance(token, NoToken):
                    failed[i] = token
                else:
                    token_ids[i] = token
        return HostSampled(token_ids, _logprobs(logits.values, rows, token_ids), failed)

    def _token(
        self, values: np.ndarray, likeliest: int, best: float, row: SamplingRow
    ) -> int | NoToken:
        """The token of one sound row."""
        if changes_logits(row):
            values = values.copy()
            adjust(torch.from_numpy(values).unsqueeze(0), [row], self._eos_ids)
            likeliest = int(values.argmax())
            best = values.item(likeliest)
            if not isfinite(best):
                return NoToken.FORBIDDEN
        params = row.sampling
        if not params.temperature:
            return likeliest
        return self._row_draw.draw(
            values,
            best,
            params.temperature,
            uniform(params.seed, params.choice, draw_number(row)),
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
        )


def _logprobs(
    logits: Tensor, rows: Sequence[SamplingRow], token_ids: list[int]
) -> list[TokenLogprob | None]:
    """Log-probabilities of the rows that asked for them, None for the others."""
    asked = {i: k for i, row in enumerate(rows) if (k := row.sampling.logprobs) is not None}
    found: list[TokenLogprob | None] = [None] * len(rows)
    if asked:
        chosen = torch.tensor([token_ids[i] for i in asked])
        numbers = row_logprobs(logits[list(asked)], chosen, list(asked.values()))
        for i, logprob in zip(asked, numbers.to_host(), strict=True):
            found[i] = logprob
    return found
