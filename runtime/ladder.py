"""Captures the planned graphs at start, and steps down where that fails: the largest sizes are
dropped, then piecewise graphs take the place of whole ones, then eager. Every rung is an event of
the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from .errors import EngineError
from .forward_mode import ForwardMode
from .planning.plan import ExecutionPlan
from .runners.runner import Runner


@runtime_checkable
class CapturingRunner(Runner, Protocol):
    """A runner that has graphs to capture before it runs."""

    @property
    def wanted(self) -> tuple[int, ...]:
        """Sizes to capture, largest first."""
        ...

    @property
    def captured(self) -> tuple[int, ...]:
        """Sizes that there are graphs of, largest first."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of its graphs."""
        ...

    def covers(self, size: int) -> bool:
        """Whether a captured graph runs batches of that size as well as one of its own would."""
        ...

    def capture(self, size: int) -> None:
        """Capture one size."""
        ...


@dataclass(frozen=True, slots=True)
class Rung:
    """What is left after capturing: the runners of every mode, best first, and the plan that says
    so.
    """

    runners: dict[ForwardMode, tuple[Runner, ...]]
    plan: ExecutionPlan


def capture_graphs(runners: Mapping[ForwardMode, tuple[Runner, ...]], plan: ExecutionPlan) -> Rung:
    """Capture all that the plan wants. Each mode keeps the best runner that has a graph, and eager
    after it.
    """
    tried: dict[int, Runner] = {}
    for mode_runners in runners.values():
        for runner in mode_runners:
            if id(runner) not in tried and isinstance(runner, CapturingRunner):
                plan = _capture(runner, plan)
            tried[id(runner)] = runner
    left: dict[ForwardMode, tuple[Runner, ...]] = {}
    for mode, mode_runners in runners.items():
        left[mode] = tuple(runner for runner in mode_runners if _has_graphs(runner))
        plan = _note_step_down(mode, left[mode][0].name, plan)
    return Rung(left, plan)


def _has_graphs(runner: Runner) -> bool:
    return not isinstance(runner, CapturingRunner) or bool(runner.captured)


def _capture(runner: CapturingRunner, plan: ExecutionPlan) -> ExecutionPlan:
    failures: dict[int, str] = {}
    for size in runner.wanted:
        if runner.covers(size):
            continue
        try:
            runner.capture(size)
        except (EngineError, RuntimeError, MemoryError) as error:
            failures[size] = _first_line(error)
    if failures:
        sizes = ", ".join(map(str, failures))
        reasons = "; ".join(dict.fromkeys(failures.values()))
        plan = plan.with_event("graphs", f"{runner.name}: no graph of {sizes} rows: {reasons}")
    if runner.captured:
        sizes = ", ".join(map(str, runner.captured))
        megabytes = runner.num_bytes / 1e6
        message = f"{runner.name}: captured {sizes} rows, {megabytes:.1f} MB"
        plan = plan.with_event("graphs", message)
    return plan


def _note_step_down(mode: ForwardMode, runner: str, plan: ExecutionPlan) -> ExecutionPlan:
    path = plan.paths[mode]
    if path.runner == runner:
        return plan
    plan = plan.with_path(replace(path, runner=runner))
    return plan.with_event("graphs", f"{mode} steps run on {runner} instead of {path.runner}")


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.partition("\n")[0]
