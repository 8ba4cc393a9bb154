"""What the tests of planning say in one word."""

from __future__ import annotations

from typing import Any

from polypath.runtime.config import EngineConfig
from polypath.runtime.forward_mode import ForwardMode
from polypath.runtime.planning.candidate import find
from polypath.runtime.planning.capability import CandidateKind
from polypath.runtime.planning.hardware import profile_names
from polypath.runtime.planning.plan import ExecutionPlan
from polypath.runtime.planning.selection import REGISTRIES

YARDSTICK = "eager+torch_sdpa+torch"
NATIVE = {
    ForwardMode.DECODE: "cpu_graph+cpu_native+cpu_native",
    ForwardMode.PREFILL: "piecewise_cpu_graph+cpu_native+cpu_native",
    ForwardMode.MIXED: "piecewise_cpu_graph+cpu_native+cpu_native",
}
PROFILES = profile_names()


def is_built(kind: CandidateKind, name: str) -> bool:
    return find(REGISTRIES[kind], name).capability.built


def first_built(kind: CandidateKind, *names: str) -> str:
    """The first that this version has an adapter for: records come to be built."""
    return next(name for name in names if is_built(kind, name))


def wishes(**options: Any) -> EngineConfig:
    return EngineConfig(model="m", **options)


def runners_of(attention: str) -> dict[ForwardMode, str]:
    """What launches each mode on a card over that attention."""
    may = find(REGISTRIES["attention"], attention).capability.graph_support != "never"
    pieces = first_built("runner", "piecewise_cuda_graph", "eager")
    whole = first_built("runner", *(["cuda_graph"] if may else []), "eager")
    return {
        ForwardMode.DECODE: whole,
        ForwardMode.PREFILL: pieces,
        ForwardMode.MIXED: pieces,
    }


def refused(found: ExecutionPlan) -> dict[str, set[str]]:
    """Candidates with the rules that refused them."""
    table: dict[str, set[str]] = {}
    for item in found.rejected:
        name = f"{item.kind}/{item.candidate}"
        table.setdefault(name, set()).update(refusal.rule for refusal in item.refusals)
    return table
