"""`polypath bench serve`: measures any OpenAI-compatible server over HTTP."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from ..bench_serve import BenchResult
    from ..bench_serve_client import Target
    from ..bench_serve_load import Load


def bench_serve(
    url: Annotated[str, typer.Argument(help="Of the server, with or without /v1.")],
    model: Annotated[str, typer.Option(help="The first that the server lists if empty.")] = "",
    completions: Annotated[
        bool, typer.Option("--completions", help="Ask /v1/completions, not chats.")
    ] = False,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(help="Clients that ask again at once, 1 and 8 if not given; repeatable."),
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(help="Requests a second, arriving by chance (Poisson); repeatable."),
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests of each load.", min=1)] = 32,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 128,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each answer.", min=1)] = 128,
    ttft_ms: Annotated[
        float | None, typer.Option(help="Target: time to the first token.", show_default=False)
    ] = None,
    itl_ms: Annotated[
        float | None,
        typer.Option(help="Target: mean time of each later token.", show_default=False),
    ] = None,
    ttlt_ms: Annotated[
        float | None, typer.Option(help="Target: time to the last token.", show_default=False)
    ] = None,
    warm_up: Annotated[int, typer.Option(help="Requests before, not counted.", min=0)] = 2,
    timeout: Annotated[float, typer.Option(help="Seconds for each request.", min=1)] = 600,
    seed: Annotated[int, typer.Option(help="Of prompts and arrival times.")] = 0,
    key_variable: Annotated[
        str, typer.Option(help="The environment variable that holds the API key.")
    ] = "POLYPATH_API_KEY",
    out: Annotated[
        Path | None, typer.Option(help="Write all figures as JSON.", show_default=False)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the distributions as SVG.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time to first, next and last token, tokens/s and goodput of any OpenAI-compatible server."""
    import asyncio

    from ..bench_serve import bench_server
    from ..bench_serve_client import Target
    from ..bench_serve_load import Load
    from ..bench_serve_report import Goals

    for file in (out, plot):
        _require_folder(file)
    lengths = {"num_requests": requests, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
    loads = [
        *(Load(concurrency=n, seed=seed, **lengths) for n in _clients(concurrency, rate)),
        *(Load(rate=n, seed=seed, **lengths) for n in _positive("--rate", rate)),
    ]
    target = Target(
        url=_base(url),
        model=model,
        is_chat=not completions,
        key=os.environ.get(key_variable),
        timeout_s=timeout,
    )
    goals = Goals(first_token_ms=ttft_ms, per_token_ms=itl_ms, whole_ms=ttlt_ms)
    with _Progress(target, loads) as progress:
        result = asyncio.run(
            bench_server(target, loads, goals=goals, warm_up=warm_up, on_sample=progress.count)
        )
    _show(result, out, plot, as_json=as_json)
    if not any(report.good for report in result.reports):
        raise typer.Exit(1)


def _show(result: BenchResult, out: Path | None, plot: Path | None, *, as_json: bool) -> None:
    from rich.console import Console

    from ..bench_serve_plot import plot as draw
    from ..bench_serve_view import render

    text = json.dumps(result.to_json(), indent=1)
    if out is not None:
        out.write_text(text + "\n")
    if plot is not None:
        plot.write_text(draw(result.title, result.reports))
    if as_json:
        typer.echo(text)
    else:
        render(result.title, result.reports, Console())


class _Progress:
    """A bar on standard error while requests run; nothing when that is no terminal."""

    def __init__(self, target: Target, loads: list[Load]) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._bars = Progress(console=Console(stderr=True), transient=True)
        self._task = self._bars.add_task(target.url, total=sum(n.num_requests for n in loads))

    def __enter__(self) -> _Progress:
        if self._bars.console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def count(self, load: Load, sample: object) -> None:
        """One request of `load` is over."""
        self._bars.update(self._task, advance=1, description=load.name)


def _clients(concurrency: list[int] | None, rate: list[float] | None) -> list[int]:
    if concurrency is None:
        return [] if rate else [1, 8]
    return [int(n) for n in _positive("--concurrency", concurrency)]


def _positive(option: str, values: list[int] | list[float] | None) -> list[float]:
    for value in values or ():
        if value <= 0:
            raise ConfigurationError(f"{option} is {value}; it must be above 0")
    return [float(value) for value in values or ()]


def _base(url: str) -> str:
    base = url.rstrip("/").removesuffix("/v1")
    return base if "://" in base else f"http://{base}"


def _require_folder(file: Path | None) -> None:
    """Found out before the measurement, not after."""
    if file is not None and not file.parent.is_dir():
        raise ConfigurationError(f"{file.parent} is no folder; {file.name} cannot be written there")
