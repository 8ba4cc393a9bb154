"""What a started worker holds: weights, KV pool, graphs, what a step takes, and the most memory so
far, beside what was planned.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .allocator import give_back
from .device_memory import DeviceMemory
from .kv.pool import KVPool
from .ladder import CapturingRunner
from .planning.memory import gigabytes
from .planning.plan import ExecutionPlan, MeasuredMemory
from .runners.runner import Runner

STATUS = Path("/proc/self/status")


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Bytes that come and go, and how they were found; None: they were not."""

    num_bytes: int | None
    origin: str


NO_STEP = Activations(num_bytes=None, origin="not measured: a largest step failed")


def of_a_step(step_bytes: int) -> Activations:
    """Of a card, where the start ran a largest step."""
    return Activations(num_bytes=step_bytes, origin="a largest step, eager, with sampling")


def of_the_start() -> Activations:
    """Of a CPU, where a largest step would take seconds: what the process held at the most and has
    given back. That is loading, mostly.
    """
    give_back()
    found = _resident()
    if found is None:
        return Activations(num_bytes=None, origin=f"not measured: {STATUS} does not say")
    now, most = found
    origin = "at the start's peak beyond what stays; a largest step was not run"
    return Activations(num_bytes=max(0, most - now), origin=origin)


def with_measured(
    plan: ExecutionPlan,
    weights_bytes: int,
    kv: KVPool,
    runners: Iterable[Sequence[Runner]],
    memory: DeviceMemory | None = None,
    activations: Activations | None = None,
) -> ExecutionPlan:
    """The plan with the bytes of now, everything being built and checked, and events that put them
    beside what was planned. `memory` None: tensors lie in the process's own.
    """
    capturing = {id(r): r for tried in runners for r in tried if isinstance(r, CapturingRunner)}
    activations = activations or of_the_start()
    peak, origin = _peak(memory)
    measured = MeasuredMemory(
        weights_bytes=weights_bytes,
        kv_bytes=kv.num_bytes,
        activation_bytes=activations.num_bytes,
        activation_origin=activations.origin,
        graph_bytes=sum(runner.num_bytes for runner in capturing.values()),
        peak_bytes=peak,
        peak_origin=origin,
    )
    plan = replace(plan, measured=measured).with_event("memory", _sentence(plan, measured))
    return _with_shortfall(plan, measured, memory)


def _peak(memory: DeviceMemory | None) -> tuple[int, str]:
    """The card's as torch counts it; on a CPU of the process, where pages of the pool that were
    never used do not count.
    """
    if memory is not None:
        return memory.peak_bytes(), "of the card, by torch's allocator"
    found = _resident()
    most = found[1] if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return most, "resident in the process, interpreter and torch included"


def _resident() -> tuple[int, int] | None:
    """Bytes of the process in memory now, and at most since it began; None where the system does
    not say. getrusage would count what the parent held when it forked.
    """
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    found = dict(line.split(":", 1) for line in lines if line.startswith(("VmRSS:", "VmHWM:")))
    if len(found) < 2:
        return None
    now, most = (int(found[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, most


def _sentence(plan: ExecutionPlan, measured: MeasuredMemory) -> str:
    parts = []
    for name in ("weights", "kv", "activation", "graph"):
        planned = gigabytes(getattr(plan.memory, f"{name}_bytes"))
        parts.append(f"{name} {shown(measured, name)} (planned {planned})")
    return f"{', '.join(parts)}, peak {gigabytes(measured.peak_bytes)} {measured.peak_origin}"


def shown(measured: MeasuredMemory, name: str) -> str:
    """Bytes of one part, or that they were not measured."""
    number = getattr(measured, f"{name}_bytes")
    return "not measured" if number is None else gigabytes(number)


def _with_shortfall(
    plan: ExecutionPlan, measured: MeasuredMemory, memory: DeviceMemory | None
) -> ExecutionPlan:
    """An event where what is measured leaves less than the reserve."""
    left, reserve = _left(plan, measured, memory), plan.memory.reserve_bytes
    if left is None or left >= reserve:
        return plan
    sentence = (
        f"warning: {gigabytes(max(0, left))} are left beside a largest step, less than the reserve "
        f"of {gigabytes(reserve)}; a lower --memory-share, --kv-bytes or --max-num-batched-tokens "
        "leaves more"
    )
    return plan.with_event("memory", sentence)


def _left(plan: ExecutionPlan, measured: MeasuredMemory, memory: DeviceMemory | None) -> int | None:
    """Bytes that a largest step leaves of the device; None: unknown."""
    step = measured.activation_bytes or 0
    if memory is not None:
        return memory.free_bytes() - step
    if plan.memory.limit_bytes is None:
        return None
    held = measured.weights_bytes + measured.kv_bytes + measured.graph_bytes
    return plan.memory.limit_bytes - held - step
