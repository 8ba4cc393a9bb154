"""What `polypath bench serve` prints: a line and a small table for each load."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .bench_serve_report import PERCENTILES, LoadReport


def render(title: str, reports: Sequence[LoadReport], console: Console) -> None:
    """All loads, one below the other."""
    console.print(Text(title), soft_wrap=True)
    for report in reports:
        console.print()
        console.print(Text(headline(report)), soft_wrap=True)
        console.print(_spreads(report))
        for kind, count in report.errors.items():
            detail = next(s.detail for s in report.run.samples if s.error == kind)
            console.print(Text(f"  {count} x {kind}: {detail or 'no more is known'}"))
        for note in report.notes:
            console.print(Text(f"  note: {note}"))


def headline(report: LoadReport) -> str:
    """A load's totals."""
    wall_s = report.run.wall_s
    parts = [
        f"{report.run.load.name}: {len(report.good)} answers",
        f"{sum(report.errors.values())} errors",
        f"{report.new_tokens / wall_s:.1f} tokens/s",
        f"{len(report.good) / wall_s:.2f} answers/s",
    ]
    if report.goodput is not None:
        parts.append(f"{report.goodput:.2f} within targets/s")
    return ", ".join(parts)


def _spreads(report: LoadReport) -> Table:
    table = Table(box=None, pad_edge=True, padding=(0, 1))
    table.add_column("ms")
    for name in ("mean", *(f"p{p}" for p in PERCENTILES)):
        table.add_column(name, justify="right")
    rows = (
        ("first token", report.first_token),
        ("between tokens", report.inter_token),
        ("per token", report.per_token),  # of an answer: tokens may well come in bundles
        ("last token", report.whole),
    )
    for name, spread in rows:
        if spread is not None:
            values = (spread.mean, *spread.percentiles.values())
            table.add_row(name, *(f"{value:.1f}" for value in values))
    return table
