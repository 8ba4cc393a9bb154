"""What a candidate is asked to do (`Situation`): the node, the model, and the values of a plan."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import ModelConfig
from ..forward_mode import ForwardMode
from .hardware import Hardware


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """The node, the model, and the values that all modes share.

    `draft_width` and `is_draft_tree` describe a verify step: tokens that are checked for each
    request, and whether they branch. No plan of this version has such a step.
    """

    hardware: Hardware
    model: ModelConfig
    device: str
    dtype: str
    kv_dtype: str
    page_size: int
    quantization: str = "auto"  # as asked
    mode: ForwardMode | None = None  # None: whatever the mode
    draft_width: int = 1
    is_draft_tree: bool = False
