"""What the tests of planning say in one word."""

from __future__ import annotations

from typing import Any

from polypath.runtime.config import EngineConfig
from polypath.runtime.forward_mode import ForwardMode
from polypath.runtime.planning.plan import ExecutionPlan

YARDSTICK = "eager+torch_sdpa+torch"
NATIVE = {
    ForwardMode.DECODE: "cpu_graph+cpu_native+cpu_native",
    ForwardMode.PREFILL: "piecewise_cpu_graph+cpu_native+cpu_native",
    ForwardMode.MIXED: "piecewise_cpu_graph+cpu_native+cpu_native",
}
PROFILES = ("avx2", "h100", "t4")


def wishes(**options: Any) -> EngineConfig:
    return EngineConfig(model="m", **options)


def refused(found: ExecutionPlan) -> dict[str, set[str]]:
    """Candidates with the rules that refused them."""
    table: dict[str, set[str]] = {}
    for item in found.rejected:
        name = f"{item.kind}/{item.candidate}"
        table.setdefault(name, set()).update(refusal.rule for refusal in item.refusals)
    return table
