"""`polypath bench routing`: our routing beside power of two choices, on the same workers."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from ..bench_routing import RoutingResult

PERCENTILES = (50, 95, 99)


def bench_routing(
    url: Annotated[str, typer.Argument(help="Of a gateway with api.compares_policies set.")],
    model: Annotated[str, typer.Option(help="The first that the server lists if empty.")] = "",
    rate: Annotated[
        float | None,
        typer.Option(
            help="Requests a second; by default 70% of what the workers measured.", min=0.001
        ),
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests of each turn.", min=1)] = 64,
    rounds: Annotated[int, typer.Option(help="Turns of each policy, A B C C B A.", min=1)] = 2,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 64,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each answer.", min=1)] = 64,
    ttlt_ms: Annotated[
        float | None,
        typer.Option(
            help="Target: time to the last token; by default twice what the fastest worker takes."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of prompts and arrival times.")] = 0,
    key_variable: Annotated[
        str, typer.Option(help="The environment variable that holds the API key.")
    ] = "POLYPATH_API_KEY",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time to the last token and goodput by our routing, by ours with the goal told in a header,
    and by power of two choices: the same load on the same workers, in turns.
    """
    import asyncio

    from rich.console import Console

    from ..api_client import ApiClient
    from ..bench_routing import Fleet
    from ..bench_routing import bench_routing as measure
    from ..bench_serve_client import Target
    from ..bench_serve_load import Load
    from ..bench_serve_report import Goals

    key = os.environ.get(key_variable)
    with ApiClient(url, key) as client:
        base, paths = client.url, client.get("/v1/paths")["data"]
    if rate is None or ttlt_ms is None:
        fleet = Fleet.of(paths)
        rate = rate or fleet.rate(new_tokens)
        ttlt_ms = ttlt_ms or fleet.whole_ms(new_tokens)
    load = Load(
        rate=rate,
        num_requests=requests,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        seed=seed,
    )
    target = Target(url=base, model=model, is_chat=False, key=key)
    goals = Goals(whole_ms=ttlt_ms)
    result = asyncio.run(measure(target, load, goals=goals, rounds=rounds))
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=1))
        return
    console = Console()
    console.print(
        f"{len(paths)} workers, {rate:.2f} requests/s of {prompt_tokens} + {new_tokens} tokens, "
        f"{rounds} x {requests} requests each, in turns; goodput: answers within {ttlt_ms:.0f} ms"
    )
    console.print(_table(result))
    console.print(_verdict(result), soft_wrap=True)


def _verdict(result: RoutingResult) -> str:
    text = f"power of two takes {result.ratio():.2f} times as long to the last token at p95"
    ratio = result.goodput_ratio()
    if ratio is not None:
        text += f"; with the goal told, {ratio:.2f} times the good answers of power of two"
    return text


def _table(result: RoutingResult) -> Table:
    from rich.table import Table

    table = Table(box=None)
    table.add_column("policy", no_wrap=True)
    for percent in PERCENTILES:
        table.add_column(f"p{percent} to the last token, ms")
    table.add_column("goodput /s")
    table.add_column("tokens/s")
    table.add_column("errors")
    for policy, report in result.reports.items():
        spread = report.whole
        spent = [f"{spread.percentiles[p]:.0f}" if spread else "-" for p in PERCENTILES]
        table.add_row(
            policy,
            *spent,
            f"{report.goodput:.2f}",
            f"{report.new_tokens / report.run.wall_s:.1f}",
            str(sum(report.errors.values())),
        )
    return table
