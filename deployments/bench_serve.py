"""Measures a server over HTTP, load after load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .bench_serve_client import Sample, Target, find_model, open_session
from .bench_serve_load import Load, run_load
from .bench_serve_prompts import learn_prompts
from .bench_serve_report import Goals, LoadReport

WARM_UP_SEED = 10**6  # prompts that no measured request has


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchResult:
    """All loads of one server."""

    target: Target
    reports: tuple[LoadReport, ...]

    @property
    def title(self) -> str:
        load = self.reports[0].run.load
        return (
            f"{self.target.model} at {self.target.url}: prompts of {load.prompt_tokens}, "
            f"answers of {load.new_tokens} tokens"
        )

    def to_json(self) -> dict[str, Any]:  # JSON
        return {
            "url": self.target.url,
            "model": self.target.model,
            "path": self.target.path,
            "ignore_eos": self.target.ignore_eos,
            "loads": [report.to_json() for report in self.reports],
        }


async def bench_server(
    target: Target,
    loads: Sequence[Load],
    *,
    goals: Goals,
    warm_up: int,
    on_sample: Callable[[Load, Sample], None],
) -> BenchResult:
    """Learn how the server counts, warm it up, and run the loads one after the other. Raises
    BenchError when it does not answer at all.
    """
    if not target.model:
        target = replace(target, model=await find_model(target.url, target.key))
    reports: list[LoadReport] = []
    async with open_session(target) as session:
        prompts, target = await learn_prompts(session, target)
        if warm_up:
            first = replace(loads[0], rate=None, concurrency=warm_up, num_requests=warm_up)
            await run_load(session, target, prompts, replace(first, seed=WARM_UP_SEED))
        for load in loads:
            run = await run_load(
                session, target, prompts, load, lambda sample, load=load: on_sample(load, sample)
            )
            reports.append(LoadReport(run=run, goals=goals))
    return BenchResult(target=target, reports=tuple(reports))
