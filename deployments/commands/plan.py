"""`polypath plan`: what a worker would do with a model on some hardware, without loading it."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ...runtime.config import EngineConfig
from .engine_options import engine_options


@engine_options
def plan(
    config: EngineConfig,
    hardware: Annotated[
        str,
        typer.Option(
            help='"this" node, a profile such as t4, h200 or xeon-amx (a wrong name lists them), '
            "or a file of `polypath probe`."
        ),
    ] = "this",
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show how a model would run, and why.

    Values and who asked for them, memory, and for each mode the choice and all refusals.
    """
    from rich.console import Console

    from ...runtime.checkpoint.source import open_checkpoint
    from ...runtime.errors import ConfigurationError
    from ...runtime.planning.hardware import load_hardware
    from ...runtime.planning.planner import plan as make_plan
    from ..plan_view import render_error, render_plan

    try:
        model = open_checkpoint(config.model, weights=False).config
        found = make_plan(load_hardware(hardware), model, config)
    except ConfigurationError as error:
        render_error(error, Console(stderr=True))
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    else:
        render_plan(found, Console())
