"""What the figures of an H200 should come to, and whether they did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CARD = "H200"


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """`figure`: how its name ends; where several do, the best of them counts."""

    figure: str
    most_ms: float | None = None
    least_share: float | None = None  # of the ceiling measured in the same run

    @property
    def wanted(self) -> str:
        """As a sentence has it."""
        if self.most_ms is not None:
            return f"<= {self.most_ms:g} ms"
        return f">= {self.least_share:.0%} of the ceiling"


TARGETS = (
    Target(figure="decode, 32 x 1024", least_share=0.75),
    Target(figure="decode, 64 x 1024", least_share=0.75),
    Target(figure="llama-3.1-8b: engine step, 1 x 1024", most_ms=4.6),
    Target(figure="llama-3.1-8b: engine step, 8 x 1024", most_ms=5.1),
    Target(figure="llama-3.1-8b: engine step, 64 x 1024", most_ms=8.0),
    Target(figure="qwen3-0.6b: engine step, 1 x 1024", most_ms=0.8),
    Target(figure="llama-3.1-8b: capture of all decode graphs", most_ms=10_000),
    Target(figure="qwen3-0.6b: capture of all decode graphs", most_ms=10_000),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One target beside what was measured."""

    name: str
    wanted: str
    found: str
    verdict: str  # met, missed, not measured; on another card: not judged


def verdicts(sections: Mapping[str, Sequence[dict[str, Any]]], device: str) -> Iterator[Verdict]:
    """Of every target, from the figures of all sections."""
    figures = [row for rows in sections.values() for row in rows if "milliseconds" in row]
    for target in TARGETS:
        of_it = [row for row in figures if row["name"].endswith(target.figure)]
        found, is_met = _best(target, of_it)
        verdict = "not measured" if is_met is None else "met" if is_met else "missed"
        if is_met is not None and CARD not in device:
            verdict = f"not judged: this is no {CARD}"
        yield Verdict(name=target.figure, wanted=target.wanted, found=found, verdict=verdict)


def _best(target: Target, figures: Sequence[dict[str, Any]]) -> tuple[str, bool | None]:
    if target.most_ms is not None:
        times = [row["milliseconds"] for row in figures if row["milliseconds"] is not None]
        return (f"{min(times):.3f} ms", min(times) <= target.most_ms) if times else ("", None)
    shares = [row["share"] for row in figures if row["share"] is not None]
    assert target.least_share is not None, "a target has a time or a share"
    return (f"{max(shares):.0%}", max(shares) >= target.least_share) if shares else ("", None)
