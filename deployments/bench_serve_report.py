"""Figures of a load: percentiles, rates, goodput against targets, errors by kind."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .bench_serve_client import Sample
from .bench_serve_load import LoadRun

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, kw_only=True, slots=True)
class Goals:
    """What an answer must keep to count as good; None asks for nothing. Milliseconds."""

    first_token_ms: float | None = None
    per_token_ms: float | None = None  # mean over an answer's tokens after the first
    whole_ms: float | None = None

    @property
    def are_set(self) -> bool:
        return any(
            goal is not None for goal in (self.first_token_ms, self.per_token_ms, self.whole_ms)
        )

    def are_met(self, sample: Sample) -> bool:
        """Whether an answer without error was good."""
        found = (
            (self.first_token_ms, sample.first_token_s),
            (self.per_token_ms, sample.per_token_s),
            (self.whole_ms, sample.whole_s),
        )
        return all(goal is None or value_s * 1000 <= goal for goal, value_s in found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Percentiles and mean of a duration, in milliseconds."""

    mean: float
    percentiles: dict[int, float]

    @classmethod
    def of(cls, values_s: Sequence[float]) -> Spread | None:
        """None when nothing was measured."""
        if not values_s:
            return None
        ordered = sorted(values_s)
        return cls(
            mean=sum(ordered) / len(ordered) * 1000,
            percentiles={p: percentile(ordered, p) * 1000 for p in PERCENTILES},
        )

    def to_json(self) -> dict[str, float]:
        return {"mean": self.mean} | {f"p{p}": value for p, value in self.percentiles.items()}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile: a value that was measured, never one in between."""
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """One load's figures."""

    run: LoadRun
    goals: Goals
    good: tuple[Sample, ...] = field(init=False)  # without error

    def __post_init__(self) -> None:
        good = tuple(sample for sample in self.run.samples if sample.error is None)
        object.__setattr__(self, "good", good)

    @property
    def errors(self) -> dict[str, int]:
        """Requests that failed, by kind."""
        kinds = Counter(sample.error for sample in self.run.samples if sample.error is not None)
        return dict(sorted(kinds.items()))

    @property
    def new_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self.good)

    @property
    def prompt_tokens(self) -> int | None:
        """None when the server told of no answer how long its prompt was."""
        counts = [sample.prompt_tokens for sample in self.good if sample.prompt_tokens is not None]
        return sum(counts) if counts else None

    @property
    def goodput(self) -> float | None:
        """Answers a second that met all goals; None without goals."""
        if not self.goals.are_set:
            return None
        return sum(map(self.goals.are_met, self.good)) / self.run.wall_s

    @property
    def first_token(self) -> Spread | None:
        return Spread.of([sample.first_token_s for sample in self.good])

    @property
    def inter_token(self) -> Spread | None:
        """Over all gaps of all answers."""
        return Spread.of([gap_s for sample in self.good for gap_s in sample.gaps_s])

    @property
    def per_token(self) -> Spread | None:
        """Of each answer's mean."""
        return Spread.of([sample.per_token_s for sample in self.good if sample.num_tokens > 1])

    @property
    def whole(self) -> Spread | None:
        return Spread.of([sample.whole_s for sample in self.good])

    @property
    def notes(self) -> list[str]:
        """What a reader of the figures has to know."""
        notes: list[str] = []
        if any(sample.new_tokens is None for sample in self.good):
            notes.append("the server sends no usage: generated tokens are chunks counted")
        if self.run.cpu_share > 0.8:
            notes.append(
                f"this generator took {self.run.cpu_share:.0%} of a core: it may measure itself"
            )
        wanted = self.run.load.new_tokens
        if any(sample.num_tokens != wanted for sample in self.good):
            notes.append(f"not all answers had the {wanted} tokens asked for")
        return notes

    def to_json(self) -> dict[str, Any]:  # JSON
        """Everything, for files."""
        spreads = {
            "first_token_ms": self.first_token,
            "inter_token_ms": self.inter_token,
            "per_token_ms": self.per_token,
            "whole_ms": self.whole,
        }
        load, wall_s = self.run.load, self.run.wall_s
        return {
            "load": {
                "concurrency": load.concurrency,
                "rate": load.rate,
                "requests": load.num_requests,
                "prompt_tokens": load.prompt_tokens,
                "new_tokens": load.new_tokens,
                "seed": load.seed,
            },
            "wall_s": wall_s,
            "answers": len(self.good),
            "errors": self.errors,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "answers_per_s": len(self.good) / wall_s,
            "new_tokens_per_s": self.new_tokens / wall_s,
            "goodput_per_s": self.goodput,
            **{name: spread and spread.to_json() for name, spread in spreads.items()},
            "generator_cpu_share": self.run.cpu_share,
            "notes": self.notes,
        }
