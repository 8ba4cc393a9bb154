"""A wish for each mode: `--attention-backend prefill=vllm_flash_attn,decode=flashinfer`."""

from __future__ import annotations

from ..errors import PlanError
from ..forward_mode import ForwardMode
from .capability import STEP_MODES

AUTO = "auto"


def wish_of(text: str, mode: ForwardMode | None) -> str:
    """What an option asks for in one mode, or "auto". Mixed batches follow the wish for prefill
    unless they have one of their own; without a mode only a wish for all counts.
    """
    by_mode = wishes_by_mode(text)
    if by_mode is None:
        return text
    if mode is ForwardMode.MIXED and mode not in by_mode:
        mode = ForwardMode.PREFILL
    return AUTO if mode is None else by_mode.get(mode, AUTO)


def names_in(text: str) -> tuple[str, ...]:
    """Every name that an option holds."""
    by_mode = wishes_by_mode(text)
    return (text,) if by_mode is None else tuple(dict.fromkeys(by_mode.values()))


def wishes_by_mode(text: str) -> dict[ForwardMode, str] | None:
    """Of "prefill=a,decode=b"; None of a plain name. PlanError for another mode, or one twice."""
    if "=" not in text:
        return None
    found: dict[ForwardMode, str] = {}
    modes = {mode.value: mode for mode in STEP_MODES}
    for part in text.split(","):
        mode, _, name = (word.strip() for word in part.partition("="))
        if mode not in modes or not name or modes[mode] in found:
            raise PlanError(
                f"{part.strip()!r} of {text!r} is no wish for a mode; write MODE=NAME once for "
                f"each of {', '.join(modes)} that you care about"
            )
        found[modes[mode]] = name
    return found
