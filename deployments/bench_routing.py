"""Measures routing: the same load on the same workers in the same run, by our policy and by power
of two choices, in turns. Ours twice: as it is, and told which answers count as good.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from typing import Any

from ..runtime.speeds import Speeds
from .bench_serve_client import BenchError, Sample, Target, find_model, open_session
from .bench_serve_load import Load, LoadRun, run_load
from .bench_serve_prompts import Prompts, learn_prompts
from .bench_serve_report import Goals, LoadReport
from .route_wish import GOAL, POLICY

OURS, WITH_GOAL, THEIRS = "fastest", "fastest + goal", "power_of_two"
SHARE_OF_CAPACITY = 0.7  # of what the workers measured of themselves: busy, and not beyond


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingResult:
    """Each policy's figures over all rounds."""

    target: Target
    reports: dict[str, LoadReport]  # by policy

    def ratio(self, percent: int = 95) -> float:
        """How many times longer power of two took to the last token of the slowest answers."""
        ours, theirs = self.reports[OURS].whole, self.reports[THEIRS].whole
        if ours is None or theirs is None:
            raise BenchError("one of the policies gave no answer without error; nothing to compare")
        return theirs.percentiles[percent] / ours.percentiles[percent]

    def goodput_ratio(self) -> float | None:
        """How many times as many good answers a second there are when the goal is told; None where
        power of two gave none, or no goal was set.
        """
        ours, theirs = self.reports.get(WITH_GOAL), self.reports[THEIRS].goodput
        if ours is None or ours.goodput is None or not theirs:
            return None
        return ours.goodput / theirs

    def to_json(self) -> dict[str, Any]:  # JSON
        return {policy: report.to_json() for policy, report in self.reports.items()}


async def bench_routing(
    target: Target,
    load: Load,
    *,
    goals: Goals,
    rounds: int,
    on_sample: Callable[[Sample], None] = lambda _: None,
) -> RoutingResult:
    """All rounds, A B C C B A, each with arrivals and prompts of its own that all policies get.
    Raises BenchError when the server does not let policies be compared.
    """
    if not target.model:
        target = replace(target, model=await find_model(target.url, target.key))
    arms = arms_of(goals)
    runs: dict[str, list[LoadRun]] = {name: [] for name in arms}
    async with open_session(target) as session:
        prompts, target = await learn_prompts(session, target)
        for number in range(rounds):
            for turn, name in enumerate(arms if number % 2 == 0 else reversed(arms)):
                asked = replace(target, headers=arms[name])
                # Other prompts each time, so that none is found in a cache; the same arrivals.
                part = replace(load, seed=load.seed + number)
                marked = MarkedPrompts(*astuple(prompts), mark=f"{number} {turn}")
                runs[name].append(await run_load(session, asked, marked, part, on_sample))
    for each in runs.values():
        _require_answers(each)
    return RoutingResult(
        target=target,
        reports={name: LoadReport(run=_joined(each), goals=goals) for name, each in runs.items()},
    )


def arms_of(goals: Goals) -> dict[str, dict[str, str]]:
    """The headers of each policy's requests."""
    arms = {OURS: {POLICY: "fastest"}, THEIRS: {POLICY: "power_of_two"}}
    if goals.whole_ms is None:
        return arms
    goal = {POLICY: "fastest", GOAL: f"{goals.whole_ms / 1000.0:g}"}
    return {OURS: arms[OURS], WITH_GOAL: goal, THEIRS: arms[THEIRS]}


def _require_answers(runs: list[LoadRun]) -> None:
    samples = [sample for run in runs for sample in run.samples]
    if all(sample.error == "http_400" for sample in samples):
        raise BenchError(f"the server refuses to compare policies: {samples[0].detail}")


def _joined(runs: list[LoadRun]) -> LoadRun:
    """All rounds as one load."""
    return LoadRun(
        load=runs[0].load,
        samples=tuple(sample for run in runs for sample in run.samples),
        wall_s=sum(run.wall_s for run in runs),
        cpu_share=max(run.cpu_share for run in runs),
    )


@dataclass(frozen=True, slots=True)
class MarkedPrompts(Prompts):
    """Other words for the same seed."""

    mark: str = ""

    def text(self, num_tokens: int, seed: str) -> str:
        return Prompts.text(self, num_tokens, f"{self.mark} {seed}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """What the workers measured of themselves, for a load and a goal that fit them."""

    tokens_s: float  # of all workers together, at the batch sizes that suit them
    fastest_step_s: float

    @classmethod
    def of(cls, paths: list[dict[str, Any]]) -> Fleet:  # JSON of /v1/paths
        """Raises BenchError when no worker tells."""
        steps: list[float] = []
        tokens_s = 0.0
        for worker in paths:
            calibration = worker.get("calibration") or {}
            speeds = Speeds.from_json(calibration.get("speeds"))
            rows = calibration.get("concurrency") or 1
            steps.append(speeds.decode_step_s(rows))
            tokens_s += speeds.decode_tokens_s(rows)
        if not tokens_s:
            raise BenchError("no worker tells how fast it is; give --rate and --ttlt-ms")
        return cls(tokens_s=tokens_s, fastest_step_s=min(filter(None, steps)))

    def rate(self, new_tokens: int) -> float:
        """Requests a second that keep the workers busy, and not beyond."""
        return SHARE_OF_CAPACITY * self.tokens_s / new_tokens

    def whole_ms(self, new_tokens: int) -> float:
        """Twice what the fastest worker takes for an answer beside as many as suit it."""
        return 2000.0 * new_tokens * self.fastest_step_s
