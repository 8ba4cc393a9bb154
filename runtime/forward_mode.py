"""The phases of a forward pass."""

from __future__ import annotations

from enum import StrEnum


class ForwardMode(StrEnum):
    """Phase of a batch. `verify` and `draft` belong to speculation; `idle` is a data-parallel rank
    without work.
    """

    DECODE = "decode"
    PREFILL = "prefill"
    MIXED = "mixed"
    VERIFY = "verify"
    DRAFT = "draft"
    IDLE = "idle"
