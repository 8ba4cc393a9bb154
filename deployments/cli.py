"""The command `polypath`: one file a command in commands/, heavy imports inside the commands."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ..runtime.errors import PolypathError
from .commands.bench import bench
from .commands.bench_autoscale import bench_autoscale
from .commands.bench_routing import bench_routing
from .commands.bench_serve import bench_serve
from .commands.chat import chat
from .commands.check import check
from .commands.diff import diff
from .commands.key import key
from .commands.paths import paths
from .commands.plan import plan
from .commands.probe import probe
from .commands.serve import serve

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (serve, chat, paths, probe, plan, check, diff, key):
    app.command()(command)
bench.command("serve")(bench_serve)
bench.command("routing")(bench_routing)
bench.command("autoscale")(bench_autoscale)
app.add_typer(bench, name="bench")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        typer.echo(f"polypath {version('polypath')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Serve language models from machines that differ, each by a planned execution path."""


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except PolypathError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        sys.stderr.close()
        sys.exit(0)
