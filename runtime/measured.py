"""What a started worker holds: weights, KV pool, graphs, and the most memory so far."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from .kv.pool import KVPool
from .ladder import CapturingRunner
from .planning.memory import gigabytes
from .planning.plan import ExecutionPlan, MeasuredMemory
from .runners.runner import Runner


def with_measured(
    plan: ExecutionPlan, weights_bytes: int, kv: KVPool, runners: Iterable[Sequence[Runner]]
) -> ExecutionPlan:
    """The plan with the bytes of now, everything being built and checked, and an event that puts
    them beside what was planned.
    """
    capturing = {id(r): r for tried in runners for r in tried if isinstance(r, CapturingRunner)}
    peak, origin = _peak(plan)
    measured = MeasuredMemory(
        weights_bytes=weights_bytes,
        kv_bytes=kv.num_bytes,
        graph_bytes=sum(runner.num_bytes for runner in capturing.values()),
        peak_bytes=peak,
        peak_origin=origin,
    )
    return replace(plan, measured=measured).with_event("memory", _sentence(plan, measured))


def _peak(plan: ExecutionPlan) -> tuple[int, str]:
    """The card's as torch counts it; on a CPU of the process, where pages of the pool that were
    never used do not count.
    """
    if plan.device == "cuda":
        return torch.cuda.max_memory_allocated(), "of the card, by torch's allocator"
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kibibytes * 1024, "resident in the process, interpreter and torch included"


def _sentence(plan: ExecutionPlan, measured: MeasuredMemory) -> str:
    parts = [
        f"{name} {gigabytes(getattr(measured, f'{name}_bytes'))} "
        f"(planned {gigabytes(getattr(plan.memory, f'{name}_bytes'))})"
        for name in ("weights", "kv", "graph")
    ]
    return f"{', '.join(parts)}, peak {gigabytes(measured.peak_bytes)} {measured.peak_origin}"
