"""Builds an engine in this process for a command, with one line on stderr for each thing that
takes time.
"""

from __future__ import annotations

import sys

import typer

from ..runtime.config import EngineConfig
from ..runtime.engine import Engine
from ..runtime.errors import ConfigurationError
from ..runtime.startup import StartupEvent


def build_engine(config: EngineConfig) -> Engine:
    """The engine; a configuration that cannot work ends the command with its reasons and exit code
    2.
    """
    from rich.console import Console

    from .plan_view import render_error

    try:
        return Engine.build(config, on_progress=_show)
    except ConfigurationError as error:
        render_error(error, Console(stderr=True))
        raise typer.Exit(2) from None


def _show(event: StartupEvent) -> None:
    if event.seconds is not None:
        print(f"{event.stage}: {event.message} ({event.seconds:.2f} s)", file=sys.stderr)
