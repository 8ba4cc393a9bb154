"""A plot as plain SVG: how many answers were at least so quick, one curve for each load."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .bench_serve_report import LoadReport, percentile

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # told apart by all
PANEL_W, PANEL_H, GAP, LEFT, TOP, BOTTOM = 300, 220, 60, 56, 84, 62
MAX_POINTS = 200  # of a curve: more cannot be seen


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One distribution, in milliseconds, of every load."""

    title: str
    values: list[list[float]]  # sorted, by load
    goal: float | None


def plot(title: str, reports: Sequence[LoadReport]) -> str:
    """The SVG's text."""
    panels = [
        _panel("Time to first token", reports, "first"),
        _panel("Between tokens", reports, "gap"),
        _panel("Time to last token", reports, "whole"),
    ]
    width = LEFT + len(panels) * (PANEL_W + GAP)
    height = TOP + PANEL_H + BOTTOM + 18 * len(reports)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(LEFT, 24, title, size=15),
        _text(LEFT, 44, "Share of answers, or of gaps between tokens, that were at least so quick"),
    ]
    for number, panel in enumerate(panels):
        parts += _draw(panel, LEFT + number * (PANEL_W + GAP), is_first=number == 0)
    parts += _legend(reports)
    return "\n".join([*parts, "</svg>\n"])


def _panel(title: str, reports: Sequence[LoadReport], kind: str) -> Panel:
    goals = reports[0].goals
    values: list[list[float]] = []
    for report in reports:
        if kind == "gap":
            found = [gap_s for sample in report.good for gap_s in sample.gaps_s]
        elif kind == "first":
            found = [sample.first_token_s for sample in report.good]
        else:
            found = [sample.whole_s for sample in report.good]
        values.append(sorted(value * 1000 for value in found))
    goal = {"first": goals.first_token_ms, "gap": None, "whole": goals.whole_ms}[kind]
    return Panel(title=title, values=values, goal=goal)


def _draw(panel: Panel, x0: float, *, is_first: bool) -> Iterator[str]:
    most = max((percentile(values, 99) for values in panel.values if values), default=1.0)
    ticks = nice_ticks(max(most, panel.goal or 0.0) * 1.05)
    scale, y1 = PANEL_W / ticks[-1], TOP + PANEL_H
    yield _text(x0, TOP - 12, panel.title, size=13)
    for tick in ticks:
        x = x0 + tick * scale
        yield f'<path d="M{x:.1f} {TOP}V{y1}" stroke="#ddd"/>'
        yield _text(x, y1 + 16, f"{tick:g}", anchor="middle")
    for percent in (0, 50, 90, 100):
        y = y1 - PANEL_H * percent / 100
        yield f'<path d="M{x0} {y:.1f}h{PANEL_W}" stroke="#ddd"/>'
        if is_first:
            yield _text(x0 - 6, y + 4, f"{percent} %", anchor="end")
    yield _text(x0 + PANEL_W / 2, y1 + 34, "milliseconds", anchor="middle")
    for number, values in enumerate(panel.values):
        if values:
            path = _curve(values, x0, scale, ticks[-1])
            colour = COLOURS[number % len(COLOURS)]
            yield f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    if panel.goal is not None:
        x = x0 + panel.goal * scale
        yield f'<path d="M{x:.1f} {TOP}V{y1}" stroke="#555" stroke-dasharray="4 3"/>'
        yield _text(x + 4, y1 - 6, "target")


def _curve(values: list[float], x0: float, scale: float, last: float) -> str:
    """Share of values at or below x, as a path; values beyond the axis end it at its edge."""
    y1, count = TOP + PANEL_H, len(values)
    step = max(1, count // MAX_POINTS)
    points = [(0.0, 0.0)]
    for index in [*range(0, count - 1, step), count - 1]:
        x, share = min(values[index], last), (index + 1) / count
        points += [(x, points[-1][1]), (x, share)]
        if values[index] > last:
            points.pop()
            break
    return "M" + "L".join(f"{x0 + x * scale:.1f} {y1 - share * PANEL_H:.1f}" for x, share in points)


def _legend(reports: Sequence[LoadReport]) -> Iterator[str]:
    for number, report in enumerate(reports):
        y = TOP + PANEL_H + BOTTOM + 18 * number
        colour = COLOURS[number % len(COLOURS)]
        yield f'<path d="M{LEFT} {y}h24" stroke="{colour}" stroke-width="3"/>'
        rate = report.new_tokens / report.run.wall_s
        text = f"{report.run.load.name}: {len(report.good)} answers, {rate:.1f} tokens/s"
        if report.errors:
            text += f", {sum(report.errors.values())} errors"
        yield _text(LEFT + 32, y + 4, text)


def nice_ticks(most: float) -> list[float]:
    """From 0 in 3 to 6 even steps of 1, 2 or 5 times a power of ten, to `most` or just beyond."""
    rough = max(most, 1e-3) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [round(step * n, 9) for n in range(math.ceil(most / step - 1e-9) + 1)]


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">'
        f"{html.escape(text)}</text>"
    )
