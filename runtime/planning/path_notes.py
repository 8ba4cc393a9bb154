"""What a plan says about its paths: wishes that hold for some modes only, attention that differs by
mode, and which of several packages a backend comes from.
"""

from __future__ import annotations

from ..config import EngineConfig
from ..forward_mode import ForwardMode
from .candidate import find
from .rules_node import JIT_CACHE, carrier_problem, first_carrier, package_problem
from .selection import REGISTRIES, Selection
from .wishes import wish_of


def path_notes(config: EngineConfig, selection: Selection) -> list[str]:
    """Sentences for `ExecutionPlan.notes`."""
    notes = _partial_wishes(config, selection) + _hybrid(selection) + _carriers(selection)
    return notes + _slow_first_start(selection)


def _partial_wishes(config: EngineConfig, selection: Selection) -> list[str]:
    """A named candidate that does not claim every mode runs beside others."""
    notes = []
    for name in ("runner", "attention_backend", "ops"):
        by_mode = {mode: wish_of(getattr(config, name), mode) for mode in selection.paths}
        for wish in dict.fromkeys(by_mode.values()):
            others: list[ForwardMode] = [
                mode
                for mode, path in selection.paths.items()
                if by_mode[mode] == wish and getattr(path, name) != wish
            ]
            if wish != "auto" and others:
                notes.append(f"{wish} does not run {', '.join(others)} batches: others run those")
    return notes


def _hybrid(selection: Selection) -> list[str]:
    """Names a plan whose modes attend by different backends."""
    by_backend: dict[str, list[str]] = {}
    for mode, path in selection.paths.items():
        by_backend.setdefault(path.attention_backend, []).append(mode.value)
    if len(by_backend) == 1:
        return []
    parts = [f"{name} for {' and '.join(modes)}" for name, modes in by_backend.items()]
    return [f"hybrid attention over one KV pool: {', '.join(parts)} batches"]


def _carriers(selection: Selection) -> list[str]:
    """From which of several packages an attention backend comes, and why from none before it."""
    notes = []
    for name in dict.fromkeys(path.attention_backend for path in selection.paths.values()):
        capability = find(REGISTRIES["attention"], name).capability
        found = first_carrier(capability, selection.situation)
        if found is None:
            continue
        before = capability.carriers[: capability.carriers.index(found)]
        reasons = [str(carrier_problem(c, selection.situation)) for c in before]
        passed = f"; passed over: {'; '.join(reasons)}" if reasons else ""
        notes.append(f"{name} comes from {found.package}{passed}")
    return notes


def _slow_first_start(selection: Selection) -> list[str]:
    """Who compiles with nvcc before it can run; FlashInfer's modules were timed on one core."""
    if package_problem(JIT_CACHE, selection.situation.hardware) is None:
        return []
    names = dict.fromkeys(path.attention_backend for path in selection.paths.values())
    return [
        f"the first start with {name} compiles kernels, minutes for each type and head dimension "
        f"(prefill took 401 s on one core, decode 57 s); later starts find them. {JIT_CACHE} holds "
        "them ready, --attention-backend triton needs none"
        for name in names
        if find(REGISTRIES["attention"], name).capability.needs_nvcc
    ]
