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
    """Show what runs where, live: each worker's planned paths and the steps they took."""
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
    elif answer["data"]:
        Console().print(paths_table(answer["data"]))
    else:
        typer.echo("no worker is there; see `polypath serve`")


def paths_table(workers: list[dict[str, Any]]) -> Table:  # JSON of /v1/paths
    """One row per worker and mode."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("worker", "model", "mode", "planned path", "steps"):
        table.add_column(heading)
    table.add_column("running", justify="right")
    table.add_column("waiting", justify="right")
    table.add_column("KV pages", justify="right")
    for worker in workers:
        stats = worker["stats"]
        head = [worker["worker_id"], worker["model"]]
        load = _load(stats) if stats else ["no answer", "", ""]
        for mode, path in worker["path"].items():
            table.add_row(*head, mode, path, _steps(worker["steps"], mode), *load)
            head, load = ["", ""], ["", "", ""]
        table.add_section()
    return table


def _load(stats: dict[str, Any]) -> list[str]:  # JSON
    pages = f"{stats['kv_pages_used']}/{stats['kv_pages_total']}"
    return [str(stats["running"]), str(stats["waiting"]), pages]


def _steps(steps: list[dict[str, Any]], mode: str) -> str:  # JSON
    """Counts of this mode, such as "eager 120 planned, 3 too_large"."""
    counts: dict[str, list[str]] = {}
    for step in steps:
        if step["mode"] == mode:
            counts.setdefault(step["runner"], []).append(f"{step['count']} {step['reason']}")
    return "; ".join(f"{runner} {', '.join(found)}" for runner, found in counts.items()) or "-"
