"""By hand: every path that a node could take, against a plain forward of the same weights.

The start-up check looks at the planned path for half a second; this one names each runner,
attention backend, ops table and linear method in turn and runs longer prompts, more rows and more
decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from .checkpoint.source import open_checkpoint
from .config import EngineConfig
from .errors import EngineError, PlanError
from .planning.hardware import Hardware
from .planning.plan import ExecutionPlan
from .planning.planner import plan as make_plan
from .planning.probe import probe
from .planning.selection import REGISTRIES, WISHES
from .self_check import SelfCheckResult, bound_of, self_check
from .startup import start

CASES = ((16, 4, 2), (1, 8, 2), (200, 16, 2), (40, 24, 8))
"""Prompt tokens, decodes, and copies that run at once, each one step behind the one before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PathCheck:
    """One path: how far its worst case is from the plain forward, or why it was not run."""

    wish: str  # the candidate that was named to get this path, "auto" for the planned one
    paths: dict[str, str]  # mode -> name; empty when refused
    linear_method: str
    events: tuple[str, ...] = ()  # of the start: graphs captured, rungs taken
    results: tuple[SelfCheckResult, ...] = ()
    problem: str | None = None  # a refusal, or what the path raised
    is_refused: bool = False  # by the planner: it does not exist here

    @property
    def passed(self) -> bool:
        """Whether every case stayed within its bound, on the path that was asked for."""
        return self.problem is None and all(result.passed for result in self.results)


def check_all(
    config: EngineConfig, on_path: Callable[[PathCheck], None] | None = None
) -> list[PathCheck]:
    """Check the planned path and then every other that the planner accepts beside what `config`
    names. Raises ConfigurationError when `config` itself has no plan.
    """
    hardware, model = probe(), open_checkpoint(config.model, weights=False).config
    found: list[PathCheck] = []
    seen: set[object] = set()
    for wish, wished in _wishes(config):
        try:
            plan = make_plan(hardware, model, wished)
        except PlanError as error:
            if wish == "auto":
                raise
            found.append(_refused(wish, error))
        else:
            key = (tuple(path.name for path in plan.paths.values()), plan.linear_method)
            if key in seen:
                continue
            seen.add(key)
            found.append(_check(wish, wished, plan, hardware))
        if on_path is not None:
            on_path(found[-1])
    return found


def _wishes(config: EngineConfig) -> Iterator[tuple[str, EngineConfig]]:
    """The configuration as it is, then with each candidate named that it leaves open."""
    yield "auto", config
    for kind, option in WISHES.items():
        if getattr(config, option) != "auto":
            continue
        for candidate in REGISTRIES[kind]:
            if candidate.capability.built:
                yield f"{option}={candidate.name}", replace(config, **{option: candidate.name})


def _refused(wish: str, error: PlanError) -> PathCheck:
    reasons = "; ".join(refusal.sentence for refusal in error.refusals) or str(error)
    return PathCheck(wish=wish, paths={}, linear_method="", problem=reasons, is_refused=True)


def _check(wish: str, config: EngineConfig, plan: ExecutionPlan, hardware: Hardware) -> PathCheck:
    names = {str(mode): path.name for mode, path in plan.paths.items()}
    found = PathCheck(wish=wish, paths=names, linear_method=plan.linear_method)
    try:
        started = start(replace(config, self_check=False))
        events = tuple(e.message for e in started.plan.events if e.stage == "graphs")
        results = tuple(
            self_check(
                started.model,
                started.runner,
                started.pages,
                bound=bound_of(started.plan),
                max_model_len=started.plan.max_model_len,
                prompt_tokens=prompt,
                decodes=decodes,
                copies=min(copies, started.plan.max_num_seqs),
            )
            for prompt, decodes, copies in CASES
        )
    except (EngineError, RuntimeError) as error:
        return replace(found, problem=str(error).partition("\n")[0])
    became = {str(mode): path.name for mode, path in started.plan.paths.items()}
    problem = None if became == names else f"the ladder went down to {became}"
    return replace(found, events=events, results=results, problem=problem)
