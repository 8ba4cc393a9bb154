"""A plot of scaling as plain SVG: what each policy had running, and what waited, over the trace."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from .autoscaling_simulator import Outcome, SimulatedPool
from .bench_autoscale import Contest
from .bench_serve_plot import COLOURS, nice_ticks

WIDTH, HEIGHT, GAP, LEFT, TOP = 520, 130, 64, 64, 76
T = TypeVar("T")
MAX_POINTS = 400  # of a line: more cannot be seen


def plot(contest: Contest, pools: Mapping[str, SimulatedPool]) -> str:
    """The SVG's text: on top the price of what runs by pool, below the answers that wait."""
    outcomes = list(contest.outcomes.items())[:2]
    width = LEFT + len(outcomes) * (WIDTH + GAP)
    height = TOP + 2 * (HEIGHT + GAP) + 20
    title = f"{contest.trace}: {contest.num_arrivals} answers"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(LEFT, 24, title, size=15),
    ]
    most_price = max(_prices(found, pools)[-1][1] for _, found in outcomes)
    most_queue = max(float(n) for _, found in outcomes for _, n in found.queue)
    for number, (name, found) in enumerate(outcomes):
        x = LEFT + number * (WIDTH + GAP)
        parts.append(_text(x, 48, _sentence(name, found), size=13))
        parts += _stack(found, pools, x, TOP, most_price)
        parts += _line(found.queue, x, TOP + HEIGHT + GAP, most_queue, found)
    return "\n".join([*parts, *_legend(pools, height), "</svg>\n"])


def _sentence(name: str, found: Outcome) -> str:
    return (
        f"{name}: cost {found.cost:.2f}, {found.num_starts} starts, queue p95 "
        f"{found.wait_s(95):.1f} s, p99 {found.wait_s(99):.1f} s"
    )


def _prices(found: Outcome, pools: Mapping[str, SimulatedPool]) -> list[tuple[str, float]]:
    """The largest price of the first pool, of the first two and so on."""
    names, best = list(pools), [0.0] * len(pools)
    for _, counts in found.history:
        total = 0.0
        for index, name in enumerate(names):
            total += counts[name] * pools[name].rules.price
            best[index] = max(best[index], total)
    return list(zip(names, best, strict=True))


def _stack(
    found: Outcome, pools: Mapping[str, SimulatedPool], x: float, y: float, most: float
) -> Iterator[str]:
    yield from _axes(x, y, most, "price of what runs, an hour", found.history[-1][0])
    scale = HEIGHT / nice_ticks(most)[-1]
    points = _thinned(found.history)
    end_s = points[-1][0] or 1.0
    names = list(pools)
    for index in reversed(range(len(names))):
        path = [f"M{x:.1f} {y + HEIGHT:.1f}"]
        for time_s, counts in points:
            price = sum(counts[name] * pools[name].rules.price for name in names[: index + 1])
            path.append(f"H{x + WIDTH * time_s / end_s:.1f}V{y + HEIGHT - price * scale:.1f}")
        path.append(f"V{y + HEIGHT:.1f}Z")
        yield f'<path d="{"".join(path)}" fill="{COLOURS[index % len(COLOURS)]}"/>'


def _line(
    queue: Sequence[tuple[float, int]], x: float, y: float, most: float, found: Outcome
) -> Iterator[str]:
    yield from _axes(x, y, most, "answers that wait", found.history[-1][0])
    scale = HEIGHT / nice_ticks(most)[-1]
    end_s = queue[-1][0] or 1.0
    path = "".join(
        f"{'L' if n else 'M'}{x + WIDTH * time_s / end_s:.1f} {y + HEIGHT - count * scale:.1f}"
        for n, (time_s, count) in enumerate(_thinned(queue))
    )
    yield f'<path d="{path}" fill="none" stroke="#333"/>'


def _axes(x: float, y: float, most: float, title: str, end_s: float) -> Iterator[str]:
    ticks = nice_ticks(most)
    yield _text(x, y - 8, title)
    for tick in ticks:
        at = y + HEIGHT - HEIGHT * tick / ticks[-1]
        yield f'<path d="M{x} {at:.1f}h{WIDTH}" stroke="#ddd"/>'
        yield _text(x - 6, at + 4, f"{tick:g}", anchor="end")
    for part in range(5):
        at, minutes = x + WIDTH * part / 4, end_s * part / 4 / 60
        yield _text(at, y + HEIGHT + 16, f"{minutes:.0f} min", anchor="middle")


def _thinned(points: Sequence[tuple[float, T]]) -> list[tuple[float, T]]:
    step = max(1, len(points) // MAX_POINTS)
    return [*points[::step], points[-1]]


def _legend(pools: Mapping[str, SimulatedPool], height: float) -> Iterator[str]:
    for index, (name, pool) in enumerate(pools.items()):
        x = LEFT + index * 220
        colour = COLOURS[index % len(COLOURS)]
        yield f'<rect x="{x}" y="{height - 26}" width="14" height="14" fill="{colour}"/>'
        yield _text(x + 20, height - 14, f"{name}, {pool.rules.price:g} an hour each")


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">'
        f"{html.escape(text)}</text>"
    )
