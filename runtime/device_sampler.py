"""Sampling on any device: all rows in the same few launches, nothing read on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.draw import draw_filtered
from ..kernels.philox import uniform
from ..kernels.transfer import Arriving, to_device
from .logits import Logits
from .logprobs import RowLogprobs, row_logprobs
from .penalties import SamplingRow, adjust, changes_logits
from .request import TokenLogprob
from .sampler import NoToken, check_shape, draw_number


class DeviceSampled:
    """The tokens of one step: on the device for the next step, and on their way to the host."""

    def __init__(
        self,
        device_ids: Tensor,  # [B] int64
        is_sound: Tensor,  # [B] bool: the model's own logits hold a finite best one and no NaN
        has_token: Tensor,  # [B] bool: and so do they after what the request does to them
        logprob_rows: tuple[int, ...] = (),  # rows that asked for log-probabilities
        logprobs: RowLogprobs | None = None,  # of `logprob_rows`
    ) -> None:
        self.device_ids = device_ids
        self._arriving = Arriving(device_ids, is_sound, has_token)
        self._logprob_rows = logprob_rows
        self._logprobs = logprobs

    def to_host(self) -> tuple[list[int], list[TokenLogprob | None]]:
        """Token ids and log-probabilities (None where not asked) of all rows."""
        found: list[TokenLogprob | None] = [None] * len(self.device_ids)
        if self._logprobs is not None:
            for row, logprob in zip(self._logprob_rows, self._logprobs.to_host(), strict=True):
                found[row] = logprob
        return self._arriving.wait()[0].tolist(), found

    def failed_rows(self) -> dict[int, NoToken]:
        """Rows without a token, and why."""
        _, is_sound, has_token = self._arriving.wait()
        return {
            row: NoToken.FORBIDDEN if is_sound[row] else NoToken.NOT_FINITE
            for row, has in enumerate(has_token.tolist())
            if not has
        }


class DeviceSampler:
    """See `Sampler`. On CPUs it is the plain twin of `HostSampler`."""

    def __init__(self, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)

    @torch.inference_mode()
    def sample(self, logits: Logits, rows: Sequence[SamplingRow]) -> DeviceSampled:
        """The next token of each row of the logits, which stay unchanged."""
        raw, best = logits.values, logits.best
        check_shape(raw.shape, len(rows), self._vocab_size)
        work = raw
        if any(map(changes_logits, rows)):
            work = raw.clone()
            adjust(work, rows, self._eos_ids)
        if best is None or work is not raw:
            largest, token_ids = work.max(dim=1)
        else:
            largest, token_ids = raw.gather(1, best[:, None])[:, 0], best.clone()
        is_sound = (largest if work is raw else raw.amax(dim=1)).isfinite()
        has_token = is_sound & largest.isfinite()
        drawn = [i for i, row in enumerate(rows) if row.sampling.temperature]
        if drawn:
            where = to_device(torch.tensor(drawn), work.device)
            tokens = _draw_rows(
                work.index_select(0, where), largest[where], [rows[i] for i in drawn]
            )
            token_ids[where] = tokens.where(has_token[where], token_ids[where])
        asked, logprobs = _asked_logprobs(raw, rows, token_ids)
        return DeviceSampled(token_ids, is_sound, has_token, asked, logprobs)


def _asked_logprobs(
    logits: Tensor, rows: Sequence[SamplingRow], token_ids: Tensor
) -> tuple[tuple[int, ...], RowLogprobs | None]:
    """Which rows asked for log-probabilities, and these."""
    asked = {i: k for i, row in enumerate(rows) if (k := row.sampling.logprobs) is not None}
    if not asked:
        return (), None
    if len(asked) < len(rows):
        where = to_device(torch.tensor(list(asked)), logits.device)
        logits, token_ids = logits.index_select(0, where), token_ids[where]
    return tuple(asked), row_logprobs(logits, token_ids, list(asked.values()))


def _draw_rows(logits: Tensor, best: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """One drawn token a row."""
    params = [row.sampling for row in rows]
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float64)
    noise = torch.tensor(
        [uniform(row.sampling.seed, row.sampling.choice, draw_number(row)) for row in rows],
        dtype=torch.float64,
    )
    return draw_filtered(
        logits,
        best,
        to_device(temperature, logits.device),
        to_device(noise, logits.device),
        top_k_R=[p.top_k for p in params],
        top_p_R=[p.top_p for p in params],
        min_p_R=[p.min_p for p in params],
    )
