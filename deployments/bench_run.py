"""One benchmark: engines and peers take turns over all workloads, quiet and beside busy cores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..runtime.bench import Measurement, Workload, check_fits, measure, model_cost
from ..runtime.ceilings import Ceilings, ceilings
from ..runtime.engine import Engine
from .bench_busy import busy_cores
from .bench_peers import Peer
from .bench_view import Row

FIRST_TOUCHES = Workload(batch=1, prompt_tokens=16, new_tokens=4)


@dataclass(slots=True)
class Contender:
    """An engine of ours, what it is called in the table, and its runs of each workload."""

    name: str
    engine: Engine
    torch_threads: int  # as its start left them; engines of other paths may want other numbers
    runs: dict[bool, list[list[Measurement]]] = field(default_factory=dict)

    def run(self, workloads: Sequence[Workload], seeds: range, *, is_busy: bool) -> None:
        """One round of all workloads."""
        torch.set_num_threads(self.torch_threads)
        kept = self.runs.setdefault(is_busy, [[] for _ in workloads])
        for workload, into in zip(workloads, kept, strict=True):
            into += [measure(self.engine, workload, seed) for seed in seeds]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchResult:
    """All rows, and what the machine was like."""

    rows: list[Row]
    top: Ceilings
    busy: int
    load_average: tuple[float, float]  # of the last minute, before and after


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Who runs what, and how often. `busy` cores are kept busy in a second turn of each round."""

    model: str
    contenders: list[Contender]
    peers: list[Peer]
    workloads: list[Workload]
    repeats: int
    rounds: int
    busy: int = 0

    def run(self) -> BenchResult:
        """A B A B over the rounds; one process computes at a time. Raises ConfigurationError when
        an engine cannot hold a workload or a peer fails.
        """
        load_before = os.getloadavg()[0]
        for contender in self.contenders:
            for workload in self.workloads:
                check_fits(contender.engine, workload)
            measure(contender.engine, FIRST_TOUCHES, seed=-1)
        threads = self.contenders[0].engine.plan.num_threads
        top = ceilings(threads)
        for turn in range(self.rounds):
            self._round(turn, is_busy=False)
            if self.busy:
                with busy_cores(self.busy):
                    self._round(turn, is_busy=True)
        top = top.best(ceilings(threads))
        return BenchResult(
            rows=self._rows(top),
            top=top,
            busy=self.busy,
            load_average=(load_before, os.getloadavg()[0]),
        )

    def _round(self, turn: int, *, is_busy: bool) -> None:
        # Seeds never come twice, so that no prompt is in a prefix cache already.
        first = (2 * turn + is_busy) * self.repeats
        for contender in self.contenders:
            seeds = range(first, first + self.repeats)
            contender.run(self.workloads, seeds, is_busy=is_busy)
        engine = self.contenders[0].engine
        for peer in self.peers:
            peer.run(
                self.model,
                engine.plan.num_threads,
                self.workloads,
                self.repeats,
                vocab=engine.model.config.vocab_size,
                first_seed=first,
                is_busy=is_busy,
            )

    def _rows(self, top: Ceilings) -> list[Row]:
        rows = []
        for contender in self.contenders:
            cost = model_cost(contender.engine)
            budget = contender.engine.plan.max_num_batched_tokens
            for is_busy, runs in contender.runs.items():
                rows += [
                    Row.of(contender.name, each, is_busy).with_roofline(cost, top, budget)
                    for each in runs
                ]
        for peer in self.peers:
            for is_busy in (False, True):
                rows += [Row.of(peer.name, r, is_busy) for r in peer.measurements(is_busy=is_busy)]
        return rows
