"""`polypath bench autoscale`: our scaling of pools beside Ray Serve's, on recorded arrivals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from ..bench_autoscale import Contest


def bench_autoscale(
    traces: Annotated[
        list[Path],
        typer.Argument(help="CSV files with time_s, num_prompt, num_new: benchmarks/traces/*.csv."),
    ],
    pools: Annotated[
        Path | None,
        typer.Option(help="YAML list of pools; by default pools.yaml beside the first trace."),
    ] = None,
    target_queue_s: Annotated[float, typer.Option(help="As in serve.yaml.", min=0.1)] = 5.0,
    scale_down_delay_s: Annotated[float, typer.Option(help="As in serve.yaml.", min=0)] = 120.0,
    prefer: Annotated[
        list[str] | None, typer.Option(help="Pools in the order they are filled; repeatable.")
    ] = None,
    tuned: Annotated[
        bool,
        typer.Option(
            "--tuned", help="Also try 150 settings of Ray Serve's policy, and show the best two."
        ),
    ] = False,
    plot_to: Annotated[
        Path | None, typer.Option("--plot", help="Folder for a plot of each trace, as SVG.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Queue time, cost and starts of both policies in virtual time; starts no Ray and no model."""
    from rich.console import Console

    from ..autoscaling_pools import ScalingRules
    from ..bench_autoscale import contest, read_pools, read_trace
    from ..bench_autoscale_plot import plot

    fleet = read_pools(pools or traces[0].with_name("pools.yaml"))
    rules = ScalingRules(
        target_queue_s=target_queue_s,
        scale_down_delay_s=scale_down_delay_s,
        prefer=tuple(prefer or ()),
    )
    console = Console(stderr=as_json)
    found: list[Contest] = []
    for path in traces:
        with console.status(f"{path.stem}: simulating"):
            found.append(contest(path.stem, read_trace(path), fleet, rules, is_tuned=tuned))
        if not as_json:
            console.print(_table(found[-1]), *_footer(found[-1]), sep="\n")
        if plot_to is not None:
            plot_to.mkdir(parents=True, exist_ok=True)
            (plot_to / f"{path.stem}.svg").write_text(plot(found[-1], fleet))
    if as_json:
        typer.echo(json.dumps([each.to_json() for each in found], indent=1))


def _table(contest: Contest) -> Table:
    from rich.table import Table

    title = f"{contest.trace}: {contest.num_arrivals} answers"
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("policy")
    for name in ("queue p50, s", "p95", "p99", "longest", "cost", "starts"):
        table.add_column(name, justify="right")
    for name, outcome in contest.outcomes.items():
        waits = [f"{outcome.wait_s(percent):.1f}" for percent in (50, 95, 99, 100)]
        table.add_row(name, *waits, f"{outcome.cost:.2f}", str(outcome.num_starts))
    return table


def _footer(contest: Contest) -> list[str]:
    from ..bench_autoscale import OURS

    lines: list[str] = []
    for name, settings in contest.settings.items():
        lines.append(
            f"{name} ({settings}): {OURS} saves {contest.saving(name):.0%} of the cost; p95 there "
            f"{contest.speedup(name):.1f}x ours"
        )
    return lines
