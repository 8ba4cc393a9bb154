"""Why a plan is as it is: what was passed over; where there is none, why, and what is nearest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..config import EngineConfig, ModelConfig
from ..errors import PlanError
from ..forward_mode import ForwardMode
from .candidate import find
from .capability import ALL_DTYPES, STEP_MODES, CandidateKind, Capability
from .device import DEVICES, why_not_device
from .dtypes import dtype_candidates, why_not_dtype
from .hardware import Hardware
from .plan import Rejection
from .quantization import WIDTHS
from .refusal import Refusal
from .rules import Situation, why_not, why_not_together
from .selection import (
    PATH_KINDS,
    REGISTRIES,
    WISHES,
    Selection,
    allowed,
    first_situation,
    select,
)
from .wishes import names_in, wish_of

NAMED_VALUES = ("device", "dtype", "kv_dtype", "quantization")
KV_DTYPES = (*ALL_DTYPES, "int8", "fp8_e4m3", "fp8_e5m2")


def refuse_unknown_names(config: EngineConfig) -> None:
    """PlanError where an option names what does not exist; it lists what does."""
    known = {
        "device": DEVICES,
        "dtype": ALL_DTYPES,
        "kv_dtype": KV_DTYPES,
        "quantization": tuple(WIDTHS),
        **{WISHES[kind]: tuple(c.name for c in REGISTRIES[kind]) for kind in REGISTRIES},
    }
    for name, values in known.items():
        given = getattr(config, name)
        for found in names_in(given) if name == "attention_backend" else (given,):
            if found != "auto" and found not in values:
                listed = ", ".join(("auto", *values))
                raise PlanError(f"{option(name)} {found!r} is unknown; it is one of {listed}")


def option(name: str) -> str:
    """A field of EngineConfig as the command line spells it."""
    return "--" + name.replace("_", "-")


def rejections(
    hardware: Hardware, model: ModelConfig, config: EngineConfig, chosen: Selection
) -> list[Rejection]:
    """Every device, dtype and candidate that was refused on the way to the chosen selection."""
    situation = chosen.situation
    found = [*_rejected_devices(hardware, config, situation.device)]
    found += _rejected_dtypes(hardware, model, config, situation)
    for kind in PATH_KINDS:
        for candidate in REGISTRIES[kind]:
            by_mode = {
                mode: _refusals(kind, candidate.name, replace(situation, mode=mode), chosen, config)
                for mode in STEP_MODES
                if mode in candidate.capability.modes
            }
            found += _merge(kind, candidate.name, by_mode)
    for candidate in REGISTRIES["linear"]:
        refusals = tuple(why_not(candidate.capability, situation))
        if not refusals and candidate.name != chosen.linear_method:
            refusals = (_passed_over("linear", candidate.name, chosen.linear_method, config),)
        if refusals:
            found.append(_rejection(None, "linear", candidate.name, refusals))
    return found


def _rejected_devices(hardware: Hardware, config: EngineConfig, device: str) -> Iterable[Rejection]:
    if config.device == "auto" and device != "cuda":
        refusals = tuple(why_not_device(hardware, "cuda"))
        if refusals:
            yield Rejection(mode=None, kind="device", candidate="cuda", refusals=refusals)


def _rejected_dtypes(
    hardware: Hardware, model: ModelConfig, config: EngineConfig, situation: Situation
) -> Iterable[Rejection]:
    for dtype in dtype_candidates(model, config, situation.device):
        refusals = tuple(why_not_dtype(hardware, situation.device, dtype))
        if refusals:
            yield Rejection(mode=None, kind="dtype", candidate=dtype, refusals=refusals)


def _refusals(
    kind: CandidateKind,
    name: str,
    situation: Situation,
    chosen: Selection,
    config: EngineConfig,
) -> tuple[Refusal, ...]:
    """Refusals of one candidate in one mode, with that of the chosen path's other half.

    A candidate that fits and was not chosen is said to be passed over.
    """
    capability = find(REGISTRIES[kind], name).capability
    refusals = why_not(capability, situation)
    assert situation.mode is not None, "candidates of paths are asked by mode"
    if kind == "runner" and situation.device in capability.devices:
        together = why_not_together(capability, _others(chosen, situation.mode), situation.mode)
        refusals += [together] if together is not None else []
    taken = getattr(chosen.paths[situation.mode], WISHES[kind])
    if not refusals and name != taken:
        refusals = [_passed_over(kind, name, taken, config)]
    return tuple(refusals)


def _others(chosen: Selection, mode: ForwardMode) -> list[Capability]:
    """What a runner of this mode would have to launch."""
    path = chosen.paths[mode]
    names: tuple[tuple[CandidateKind, str], ...] = (
        ("attention", path.attention_backend),
        ("ops", path.ops),
        ("linear", chosen.linear_method),
    )
    return [find(REGISTRIES[kind], name).capability for kind, name in names]


def _passed_over(kind: CandidateKind, name: str, taken: str, config: EngineConfig) -> Refusal:
    """For a candidate that fits: which one was taken before it, and how to have this one."""
    is_asked = taken in names_in(getattr(config, WISHES[kind]))
    why = "was asked for" if is_asked else "ranks before it here"
    return Refusal(
        rule="rank",
        kind="performance",
        sentence=f"{name} would fit, but {taken} {why}",
        lift=f"{option(WISHES[kind])} {name}",
    )


def _merge(
    kind: CandidateKind, name: str, by_mode: dict[ForwardMode, tuple[Refusal, ...]]
) -> list[Rejection]:
    """One rejection for all modes where the reasons are the same, else one for each."""
    reasons = set(by_mode.values())
    if len(reasons) == 1 and len(by_mode) == len(STEP_MODES):
        only = reasons.pop()
        return [_rejection(None, kind, name, only)] if only else []
    return [_rejection(mode, kind, name, only) for mode, only in by_mode.items() if only]


def _rejection(
    mode: ForwardMode | None, kind: CandidateKind, name: str, refusals: tuple[Refusal, ...]
) -> Rejection:
    return Rejection(mode=mode, kind=kind, candidate=name, refusals=refusals)


def no_plan(hardware: Hardware, model: ModelConfig, config: EngineConfig) -> PlanError:
    """The error for a node, model and options that no selection fits."""
    refusals = list(dict.fromkeys(_blocking(hardware, model, config)))
    wishes = [
        f"{option(name)} {getattr(config, name)}"
        for name in (*NAMED_VALUES, *WISHES.values(), "page_size")
        if getattr(config, name) not in ("auto", None)
    ]
    nearest = _nearest(hardware, model, config)
    subject = f"{' with '.join(wishes)} cannot run here" if wishes else "nothing can run here"
    reasons = "; ".join(refusal.sentence for refusal in refusals)
    ending = f" Nearest choice that works: {nearest}." if nearest else ""
    return PlanError(f"{subject}: {reasons}.{ending}", refusals, nearest)


def _blocking(hardware: Hardware, model: ModelConfig, config: EngineConfig) -> Iterable[Refusal]:
    """Refusals of every named candidate, and of the built ones of a kind where none fits."""
    situation = first_situation(hardware, model, config)
    yield from why_not_device(hardware, situation.device)
    yield from why_not_dtype(hardware, situation.device, situation.dtype)
    for kind in REGISTRIES:
        modes: tuple[ForwardMode | None, ...] = (None,) if kind == "linear" else STEP_MODES
        for mode in modes:
            yield from _blocking_kind(kind, config, replace(situation, mode=mode))
    yield from _blocking_pairs(config)


def _blocking_kind(
    kind: CandidateKind, config: EngineConfig, situation: Situation
) -> Iterable[Refusal]:
    candidates = allowed(kind, config, situation.mode)
    answers = [(c.capability, why_not(c.capability, situation)) for c in candidates]
    if any(not refusals for _, refusals in answers):
        return
    for rule in ("quantization", "device"):  # those of this width, and this device, say why not
        willing = [a for a in answers if rule not in {refusal.rule for refusal in a[1]}]
        answers = willing or answers
    for capability, refusals in answers:
        if capability.built or len(answers) == 1:
            yield from refusals


def _blocking_pairs(config: EngineConfig) -> Iterable[Refusal]:
    """Of a named runner: why it cannot launch what else was named."""
    if config.runner == "auto":
        return
    runner = find(REGISTRIES["runner"], config.runner).capability
    for kind in ("attention", "ops", "linear"):
        for mode in runner.modes:
            name = wish_of(getattr(config, WISHES[kind]), mode)
            others = [] if name == "auto" else [find(REGISTRIES[kind], name).capability]
            together = why_not_together(runner, others, mode)
            if together is not None:
                yield together


def _nearest(hardware: Hardware, model: ModelConfig, config: EngineConfig) -> str | None:
    """The fewest wishes given up for a selection that works: one if possible, else all."""
    named = [name for name in (*WISHES.values(), *NAMED_VALUES) if getattr(config, name) != "auto"]
    named += ["page_size"] if config.page_size is not None else []
    for given_up in [*([name] for name in named), named]:
        for relaxed in _relaxed(config, given_up):
            selection = select(hardware, model, relaxed)
            if given_up and selection is not None:
                return " ".join(f"{option(n)} {_chosen(n, selection)}" for n in given_up)
    return None


def _relaxed(config: EngineConfig, given_up: list[str]) -> Iterable[EngineConfig]:
    """The config without some wishes; a quantization is changed before it is given up."""
    if given_up == ["quantization"]:
        for width in WIDTHS:
            yield replace(config, quantization=width)
    yield replace(config, **{n: None if n == "page_size" else "auto" for n in given_up})


def _chosen(name: str, selection: Selection) -> str:
    situation = selection.situation
    values = {
        "device": situation.device,
        "dtype": situation.dtype,
        "kv_dtype": situation.kv_dtype,
        "page_size": str(situation.page_size),
        "linear_method": selection.linear_method,
        "quantization": situation.quantization,
    }
    if name in values:
        return values[name]
    names = {mode: str(getattr(path, name)) for mode, path in selection.paths.items()}
    if name != "attention_backend" or len(set(names.values())) == 1:
        return names[ForwardMode.DECODE]
    return ",".join(f"{mode}={found}" for mode, found in names.items())
