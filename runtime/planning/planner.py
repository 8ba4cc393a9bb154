"""From facts, a model and wishes to one plan: a pure function that loads nothing."""

from __future__ import annotations

from ..config import EngineConfig, ModelConfig
from ..errors import PlanError
from .device import first_usable_gpu, why_not_device
from .dtypes import dtype_notes
from .explanation import no_plan, refuse_unknown_names, rejections
from .fitting import with_what_fits
from .hardware import Hardware
from .memory import device_budget
from .path_notes import path_notes
from .plan import ExecutionPlan, Origin
from .quantization import ACTIVATIONS, weight_notes
from .refusal import Refusal
from .rules import Situation, native_variant
from .selection import PAGE_SIZES, WISHES, Selection, select
from .sizes import Sizes, choose_sizes

ENVIRONMENT = {"cpu": {"OMP_WAIT_POLICY": "passive"}}
"""Variables that a worker's process needs before it imports torch: threads of torch's team that
spin while they wait take the core that a gateway, a proxy or another thread needs."""


OVERLAP_DEPTH = {"cpu": 0, "cuda": 1}
"""A card computes while the host schedules the next step; a CPU's cores are the host."""


def plan(hardware: Hardware, model: ModelConfig, config: EngineConfig) -> ExecutionPlan:
    """The best plan that honours every explicit wish.

    PlanError carries the refusals where a wish cannot be met or the model cannot fit.
    """
    refuse_unknown_names(config)
    hardware = hardware.with_library(config.flash_attn_library)
    selection = select(hardware, model, config)
    if selection is None:
        raise no_plan(hardware, model, config)
    budget = device_budget(hardware, selection.situation.device)
    try:
        sizes = choose_sizes(model, config, selection, budget)
    except PlanError as error:
        raise with_what_fits(error, hardware, model, config) from None
    return _plan(hardware, model, config, selection, sizes)


def _plan(
    hardware: Hardware,
    model: ModelConfig,
    config: EngineConfig,
    selection: Selection,
    sizes: Sizes,
) -> ExecutionPlan:
    situation = selection.situation
    return ExecutionPlan(
        hardware=hardware.name,
        software=hardware.software,
        model=describe_model(model),
        device=situation.device,
        device_name=_device_name(hardware, situation.device),
        dtype=situation.dtype,
        kv_dtype=situation.kv_dtype,
        page_size=situation.page_size,
        linear_method=selection.linear_method,
        quantization=selection.width,
        paths=selection.paths,
        max_model_len=sizes.max_model_len,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_waiting=sizes.max_waiting,
        num_pages=sizes.num_pages,
        kv_bytes=sizes.memory.kv_bytes,
        prefix_cache=config.prefix_cache,
        memory=sizes.memory,
        num_threads=_num_threads(hardware, config),
        native_kernels=_native_kernels(hardware, selection),
        flash_attn_library=config.flash_attn_library,
        capture_sizes=sizes.capture_sizes,
        overlap_depth=_overlap_depth(config, situation.device),
        environment=dict(ENVIRONMENT.get(situation.device, {})),
        rejected=tuple(rejections(hardware, model, config, selection)),
        origins=_origins(model, config, situation) | sizes.origins,
        notes=tuple(_notes(hardware, model, config, selection) + sizes.notes),
    )


def _num_threads(hardware: Hardware, config: EngineConfig) -> int:
    """As asked, else as many as there are cores; PlanError for more than that."""
    wished, most = config.num_threads, hardware.cpu.cores_usable
    if wished is None or wished <= most:
        return wished or most
    sentence = f"--num-threads {wished} is more than {most}: {hardware.cpu.cores_origin}"
    lift = f"--num-threads {most} or fewer"
    refusal = Refusal(rule="num_threads", kind="unavailable", sentence=sentence, lift=lift)
    raise PlanError(f"{sentence}. What would work: {lift}.", [refusal], lift)


def _overlap_depth(config: EngineConfig, device: str) -> int:
    """As asked, else what suits the device."""
    return OVERLAP_DEPTH[device] if config.overlap_depth is None else config.overlap_depth


def _native_kernels(hardware: Hardware, selection: Selection) -> str | None:
    """The build of our CPU kernels, where a chosen candidate uses it."""
    return native_variant(hardware) if selection.uses_native_kernels() else None


def describe_model(model: ModelConfig) -> str:
    """One line that tells models apart: architecture, shape, stored type."""
    return (
        f"{model.architecture}, {model.num_layers} layers of {model.hidden_size}, "
        f"{model.num_heads}/{model.num_kv_heads} heads of {model.head_dim}, "
        f"vocabulary {model.vocab_size}, stored as {model.stored_dtype}"
    )


def _device_name(hardware: Hardware, device: str) -> str:
    gpu = first_usable_gpu(hardware) if device == "cuda" else None
    return gpu.name if gpu is not None else hardware.cpu.name


def _origins(model: ModelConfig, config: EngineConfig, situation: Situation) -> dict[str, Origin]:
    """Who asked for each value that is no size; a named one is the user's."""
    decided: dict[str, Origin] = {
        "device": "hardware",
        "dtype": "model" if situation.dtype == model.stored_dtype else "hardware",
        "kv_dtype": "default",
        "page_size": "default",
        "linear_method": "default",
        "quantization": "default",
    }
    origins: dict[str, Origin] = {
        name: origin if getattr(config, name) in ("auto", None) else "user"
        for name, origin in decided.items()
    }
    for name in WISHES.values():
        if name != "linear_method":
            origins[name] = "hardware" if getattr(config, name) == "auto" else "user"
    origins["prefix_cache"] = "default" if config.prefix_cache else "user"
    origins["overlap_depth"] = "default" if config.overlap_depth is None else "user"
    origins["num_threads"] = "hardware" if config.num_threads is None else "user"
    return origins


def _notes(
    hardware: Hardware, model: ModelConfig, config: EngineConfig, selection: Selection
) -> list[str]:
    device, dtype = selection.situation.device, selection.situation.dtype
    notes = []
    if config.device == "auto" and device == "cpu" and hardware.gpus:
        reasons = "; ".join(refusal.sentence for refusal in why_not_device(hardware, "cuda"))
        notes.append(
            f"warning: a GPU is here but cannot be used, so this runs on the CPU: {reasons}"
        )
    if hardware.cpu.cores_given is not None and config.num_threads is None:
        notes.append(f"num_threads is {hardware.cores_usable}: {hardware.cpu.cores_origin}")
    notes += _changed_dtype(hardware, model, config, selection)
    notes += _changed_page_size(config, selection)
    method = selection.linear_method
    if method in ACTIVATIONS:
        notes += weight_notes(model, method, selection.width)
    notes += dtype_notes(hardware, model, device, dtype, method)
    notes += path_notes(config, selection)
    return notes


def _changed_dtype(
    hardware: Hardware, model: ModelConfig, config: EngineConfig, selection: Selection
) -> list[str]:
    dtype = selection.situation.dtype
    refused = [r for r in rejections(hardware, model, config, selection) if r.kind == "dtype"]
    return [f"{dtype} instead of {r.candidate}: {r.refusals[0].sentence}" for r in refused]


def _changed_page_size(config: EngineConfig, selection: Selection) -> list[str]:
    """Pages that are not of the size that "auto" likes best, and whom they are for."""
    found = selection.situation.page_size
    if config.page_size is not None or found == PAGE_SIZES[0]:
        return []
    names = dict.fromkeys(path.attention_backend for path in selection.paths.values())
    return [f"pages of {found} tokens instead of {PAGE_SIZES[0]}, for {', '.join(names)}"]
