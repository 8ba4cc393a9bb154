"""`polypath check`: every path that this machine could take, against a plain forward."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ...runtime.config import EngineConfig
from .engine_options import engine_options

if TYPE_CHECKING:
    from ...runtime.full_check import PathCheck


@engine_options
def check(
    config: EngineConfig,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run each path that fits this machine against a plain forward of the same stored weights.

    Exit code 1 when one differs by more than its bound. Name a candidate (--runner, --ops ...) to
    leave only paths that have it.
    """
    from rich.console import Console

    from ...runtime.errors import ConfigurationError
    from ...runtime.full_check import check_all
    from ..plan_view import render_error

    def show(found: PathCheck) -> None:
        if not as_json:
            print(_line(found), flush=True)

    try:
        checks = check_all(config, show)
    except ConfigurationError as error:
        render_error(error, Console(stderr=True))
        raise typer.Exit(2) from None
    if as_json:
        rows = [{**asdict(found), "passed": found.passed} for found in checks]
        typer.echo(json.dumps(rows, indent=1))
    failed = [found for found in checks if not found.passed and not found.is_refused]
    if failed:
        typer.echo(f"{len(failed)} of {len(checks)} paths failed", err=True)
        raise typer.Exit(1)


def _line(found: PathCheck) -> str:
    """What one path came to."""
    if found.is_refused:
        return f"refused  {found.wish}: {found.problem}"
    paths = ", ".join(dict.fromkeys(found.paths.values()))
    verdict = "passed " if found.passed else "FAILED "
    line = f"{verdict}  {found.wish}: {paths}, weights {found.linear_method}"
    if found.results:
        worst = max(found.results, key=lambda result: result.error / result.bound)
        seconds = sum(result.seconds for result in found.results)
        line += f"; error at most {worst.error:.1e} (bound {worst.bound:.0e}), {seconds:.1f} s"
    return f"{line}; {found.problem}" if found.problem else line
