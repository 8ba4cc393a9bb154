"""Before the KV pool exists: a largest step and the largest graphs over a pool of one page, so that
the pool gets what is measured to be left.

Graphs hold addresses, so those of the trial go when it ends; the ones that serve are captured over
the real pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from .config import EngineConfig
from .device_memory import DeviceMemory
from .errors import EngineError
from .forward_mode import ForwardMode
from .kv.pool import KVPool
from .ladder import CapturingRunner
from .largest_step import largest_rows, run_largest
from .models.decoder import Decoder
from .planning.memory import SCRATCH_PAGES, gigabytes
from .planning.plan import ExecutionPlan
from .planning.sizes import LEAST_LEN, memory_share
from .runners.runner import Runner

Runners = Mapping[ForwardMode, Sequence[Runner]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """Bytes of a device. `free_bytes`: with weights, attention and the graphs of the trial there,
    and nothing of a step.
    """

    step_bytes: int  # of the largest step, beyond what stays
    graph_bytes: int  # of all graphs
    more_graph_bytes: int  # of those that the trial did not capture
    free_bytes: int


def run_trial(
    plan: ExecutionPlan,
    model: Decoder,
    memory: DeviceMemory,
    make: Callable[[KVPool], Runners],
    *,
    captures: bool,
) -> Trial:
    """Measure over runners that `make` gives. Without `captures`, no graph is tried."""
    kv = KVPool(
        model.config,
        num_pages=SCRATCH_PAGES,
        page_size=plan.page_size,
        dtype=getattr(torch, plan.kv_dtype),
        device=torch.device(plan.device),
    )
    runners = make(kv)
    eager, rows = runners[ForwardMode.MIXED][-1], largest_rows(plan)
    run_largest(eager, model, plan, rows)  # kernels compile, libraries take their workspaces
    before = memory.held_bytes()
    memory.watch()
    run_largest(eager, model, plan, rows)
    step = max(0, memory.watched_bytes() - before)
    graphs, more = _try_graphs(runners, plan) if captures else (0, 0)
    free = memory.free_bytes()
    return Trial(step_bytes=step, graph_bytes=graphs, more_graph_bytes=more, free_bytes=free)


def _try_graphs(runners: Runners, plan: ExecutionPlan) -> tuple[int, int]:
    """Bytes of all graphs, and of those not captured here. The plan's estimate where a capture
    fails: the ladder will find that again.
    """
    capturing = {id(r): r for each in runners.values() for r in each}
    whole, more = 0, 0
    try:
        for runner in capturing.values():
            if isinstance(runner, CapturingRunner) and runner.wanted:
                left = _try_largest(runner)
                whole, more = whole + runner.num_bytes + left, more + left
    except (EngineError, RuntimeError, MemoryError):
        return plan.memory.graph_bytes, plan.memory.graph_bytes
    return whole, more


def _try_largest(runner: CapturingRunner) -> int:
    """Capture the largest graph, which brings the pool, and one more, which says what each other
    one adds; the bytes of those others.
    """
    runner.capture(runner.wanted[0])
    largest = runner.num_bytes
    others = [size for size in runner.wanted[1:] if not runner.covers(size)]
    if not others:
        return 0
    runner.capture(others[0])
    return (len(others) - 1) * max(0, runner.num_bytes - largest)


def has_own_pool(plan: ExecutionPlan, config: EngineConfig) -> bool:
    """Whether the pool is ours to size: not given in bytes, nor copied out of its pages by
    attention, which then takes more the larger it is.
    """
    gathers = any(path.attention_backend == "torch_sdpa" for path in plan.paths.values())
    return config.kv_bytes is None and not gathers


def with_measured_pool(plan: ExecutionPlan, trial: Trial, config: EngineConfig) -> ExecutionPlan:
    """The plan with as many pages as its share of what is left holds, and an event that says so.
    Where that is less than the planned context needs, the context is cut.
    """
    page_bytes = plan.kv_bytes // plan.num_pages
    taken = trial.step_bytes + trial.more_graph_bytes + plan.memory.reserve_bytes
    room = trial.free_bytes - taken
    allowed = int(memory_share(config, plan.device) * room) // page_bytes
    num_pages = max(allowed, _least_pages(plan))
    longest = min(plan.max_model_len, (num_pages - SCRATCH_PAGES) * plan.page_size)
    sentence = (
        f"KV pool of {num_pages} pages, {plan.num_pages} planned: {gigabytes(trial.free_bytes)} "
        f"are free without it, of which the largest step takes {gigabytes(trial.step_bytes)}, "
        f"graphs {gigabytes(trial.more_graph_bytes)} more, the reserve "
        f"{gigabytes(plan.memory.reserve_bytes)}"
    )
    if longest < plan.max_model_len:
        sentence += f"; max_model_len is {longest} instead of {plan.max_model_len}"
    measured = replace(
        plan, num_pages=num_pages, kv_bytes=num_pages * page_bytes, max_model_len=longest
    )
    return measured.with_event("kv_pool", sentence)


def _least_pages(plan: ExecutionPlan) -> int:
    """Of the context without which there was no plan."""
    is_asked = plan.origins.get("max_model_len") == "user"
    least = plan.max_model_len if is_asked else min(LEAST_LEN, plan.max_model_len)
    return -(-least // plan.page_size) + SCRATCH_PAGES
