"""What would fit where a model does not: other wishes, each of them planned before it is named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from ..config import EngineConfig, ModelConfig
from ..errors import PlanError
from .capability import ALL_DTYPES
from .hardware import Hardware
from .memory import device_budget, gigabytes
from .quantization import WIDTHS
from .refusal import Refusal
from .selection import Selection, select
from .sizes import Sizes, choose_sizes

MOST_PROPOSALS = 3
SMALL_BATCH = {"max_num_seqs": 8, "max_num_batched_tokens": 256}


def with_what_fits(
    error: PlanError, hardware: Hardware, model: ModelConfig, config: EngineConfig
) -> PlanError:
    """The error of a model that does not fit, with the wishes that would; any other as it is."""
    refusal = error.refusals[0] if error.refusals else None
    if refusal is None or refusal.rule != "memory":
        return error
    found = list(islice(_proposals(hardware, model, config), MOST_PROPOSALS))
    lift = ", or ".join([*found, refusal.lift])
    told = Refusal(rule="memory", kind=refusal.kind, sentence=refusal.sentence, lift=lift)
    return PlanError(f"{refusal.sentence}. What would work: {lift}.", [told], lift)


def _proposals(hardware: Hardware, model: ModelConfig, config: EngineConfig) -> Iterator[str]:
    """Options that fit, those first that change least."""
    for options, changed in _alternatives(hardware, model, config):
        sized = _sized(hardware, model, changed)
        if sized is None:
            continue
        if options == "--max-model-len":
            yield f"--max-model-len {sized[1].max_model_len}"
            return  # nothing but the length was too much
        memory = sized[1].memory
        yield f"{options} (weights {gigabytes(memory.weights_bytes)}, {_length(sized[1])})"


def _length(sizes: Sizes) -> str:
    return f"{sizes.max_model_len} tokens of context"


def _sized(
    hardware: Hardware, model: ModelConfig, config: EngineConfig
) -> tuple[Selection, Sizes] | None:
    selection = select(hardware, model, config)
    if selection is None:
        return None
    budget = device_budget(hardware, selection.situation.device)
    try:
        return selection, choose_sizes(model, config, selection, budget)
    except PlanError:
        return None


def _alternatives(
    hardware: Hardware, model: ModelConfig, config: EngineConfig
) -> Iterator[tuple[str, EngineConfig]]:
    """(what to write, the config that it makes)."""
    if config.max_model_len is not None:
        yield "--max-model-len", replace(config, max_model_len=None, kv_bytes=None)
    if config.kv_bytes is not None:
        yield "a smaller --kv-bytes, or none", replace(config, kv_bytes=None)
    small = {name: most for name, most in SMALL_BATCH.items() if getattr(config, name) is None}
    if small:
        words = " ".join(f"--{name.replace('_', '-')} {most}" for name, most in small.items())
        yield words, replace(config, **small)
    current = select(hardware, model, config)
    is_card = current is not None and current.situation.device == "cuda"
    for device in (config.device, "cpu") if is_card else (config.device,):
        on_device = replace(config, device=device)
        words = [] if device == config.device else [f"--device {device}"]
        if words:
            yield " ".join(words), on_device
        for name, values in (("quantization", tuple(WIDTHS)), ("dtype", ALL_DTYPES)):
            for value in values if getattr(config, name) == "auto" else ():
                changed = replace(on_device, **{name: value})
                yield " ".join([*words, f"--{name} {value}"]), changed
