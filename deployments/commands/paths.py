"""`polypath paths`: which path every worker of a running server planned, and what really ran."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table


def paths(
    url: Annotated[str, typer.Option(help="Where the server is.")] = "http://127.0.0.1:8000",
    as_json: Annotated[bool, typer.Option("--json", help="Print what /v1/paths answers.")] = False,
) -> None:
    """Show what runs where, live.

    Each worker's planned paths and the steps they took.
    """
    from rich.console import Console

    from ..api_client import ApiClient, ApiClientError

    try:
        with ApiClient(url) as client:
            answer = client.get("/v1/paths")
    except ApiClientError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    elif not answer["data"]:
        typer.echo("no worker is there yet")
    for worker in answer["data"] if not as_json else []:
        console = Console()
        if not console.is_terminal:  # lines for a script or a file are not folded
            console = Console(width=200)
        console.print(headline(worker), markup=False, highlight=False, soft_wrap=True)
        console.print(paths_table(worker))
        console.print(memory_line(worker), markup=False, highlight=False, soft_wrap=True)


def headline(worker: dict[str, Any]) -> str:  # JSON of one worker in /v1/paths
    """Who it is and how busy."""
    stats = worker["stats"]
    load = "does not answer"
    if stats is not None:
        load = f"{stats['running']} running, {stats['waiting']} waiting, "
        load += f"{stats['kv_pages_used']} of {stats['kv_pages_total']} KV pages"
    where = ", ".join(filter(None, (f"pool {worker['pool']}", worker["node"]["address"])))
    return f"{worker['worker_id']}  {worker['model']}  {where}  {worker['fingerprint']}  {load}"


def memory_line(worker: dict[str, Any]) -> str:  # JSON of one worker in /v1/paths
    """Each part as it was measured after the start, and as it was planned."""
    from ...runtime.planning.memory import gigabytes

    plan = worker["plan"] or {}
    planned, measured = plan.get("memory") or {}, plan.get("measured")
    if measured is None:
        return "memory: not measured"
    parts = []
    for name in ("weights", "kv", "activation", "graph"):
        number = measured.get(f"{name}_bytes")
        found = "not measured" if number is None else gigabytes(number)
        parts.append(f"{name} {found} of {gigabytes(planned.get(f'{name}_bytes'))} planned")
    parts[2] += f" ({measured.get('activation_origin', 'by an older version')})"
    peak = f"peak {gigabytes(measured['peak_bytes'])} {measured['peak_origin']}"
    return f"memory: {', '.join([*parts, peak])}"


def paths_table(worker: dict[str, Any]) -> Table:  # JSON of one worker in /v1/paths
    """One row per mode: what is planned and what ran."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", padding=(0, 2))
    for heading in ("mode", "planned path", "on it", "steps so far"):
        table.add_column(heading, overflow="fold")
    for mode, path in worker["path"].items():
        steps = [step for step in worker["steps"] if step["mode"] == mode]
        table.add_row(mode, path, _share(steps), _steps(steps))
    return table


def _share(steps: list[dict[str, Any]]) -> str:  # JSON
    """How many of the steps ran as planned, rounded down: 100% means all."""
    total = sum(step["count"] for step in steps)
    planned = sum(step["count"] for step in steps if step["reason"] == "planned")
    return f"{100 * planned // total}%" if total else "-"


def _steps(steps: list[dict[str, Any]]) -> str:  # JSON
    """Counts of one mode, such as "cpu_graph 120 planned; eager 3 above_largest_bucket"."""
    counts: dict[str, list[str]] = {}
    for step in steps:
        counts.setdefault(step["runner"], []).append(f"{step['count']} {step['reason']}")
    return "; ".join(f"{runner} {', '.join(found)}" for runner, found in counts.items()) or "none"
