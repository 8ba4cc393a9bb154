"""Why a step was, or was not, launched while the one before it ran (overlap depth 1)."""

from __future__ import annotations

from enum import StrEnum


class Overlap(StrEnum):
    """How a step was launched where steps overlap; at depth 0 nothing is counted."""

    OVERLAPPED = "overlapped"  # while the step before it ran
    IDLE = "idle"  # no step ran
    PENALTIES = "penalties"  # they count the token that the step before it was still drawing
