"""From a batch's logits to its next tokens: each row by its own rules, blind to the others."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from .logits import Logits
from .penalties import SamplingRow
from .request import TokenLogprob


class NoToken(StrEnum):
    """Why a row gave no token: the model's fault or the request's."""

    NOT_FINITE = "the model's logits are not finite; its weights may be damaged"
    FORBIDDEN = "the request's own logit_bias, penalties and min_tokens forbid every token"


class Sampled(Protocol):
    """The tokens of one step."""

    @property
    def device_ids(self) -> Tensor:
        """Token ids int64 [B] where the next step reads them."""
        ...

    def to_host(self) -> tuple[list[int], list[TokenLogprob | None]]:
        """Token ids and log-probabilities (None where not asked) of all rows."""
        ...

    def failed_rows(self) -> dict[int, NoToken]:
        """Rows whose logits held NaN, +inf or nothing finite, and why; their token means
        nothing.
        """
        ...


class Sampler(Protocol):
    """Chooses the next token of every row. It keeps nothing between calls: all is in the rows."""

    def sample(self, logits: Logits, rows: Sequence[SamplingRow]) -> Sampled:
        """The next token of each row of `logits`, which stay unchanged.

        Greedy rows cost one argmax; only rows that ask for more pay for more.
        """
        ...


def build_sampler(
    vocab_size: int,
    device: torch.device,
    eos_ids: Sequence[int],
    *,
    overlaps: bool = False,
) -> Sampler:
    """The sampler that suits a device; both draw the same tokens from the same logits. Where steps
    overlap, tokens stay on the device.
    """
    from .device_sampler import DeviceSampler
    from .host_sampler import HostSampler

    if device.type == "cpu" and not overlaps:
        return HostSampler(vocab_size, eos_ids)
    return DeviceSampler(vocab_size, eos_ids)


def draw_number(row: SamplingRow) -> int:
    """Which token of its answer a row's next one is."""
    return len(row.token_ids) - row.num_prompt


def check_shape(shape: Sequence[int], num_rows: int, vocab_size: int) -> None:
    """Assert that there is a row of logits for each row."""
    assert tuple(shape) == (num_rows, vocab_size), (
        f"logits {tuple(shape)} must be [{num_rows} rows, {vocab_size} tokens]"
    )
