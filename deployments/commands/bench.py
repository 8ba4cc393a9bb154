"""`polypath bench`: measures, and says on what."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...runtime.config import EngineConfig
from ..bench_options import repeatable_paths, variant_name
from .bench_quality import quality
from .engine_options import engine_options

if TYPE_CHECKING:
    from ...runtime.bench import Workload
    from ..bench_run import Bench, BenchResult, Contender

bench = typer.Typer(no_args_is_help=True, help="Measure engines.")
Counts = list[int] | None


@repeatable_paths
@engine_options
def engine(
    config: EngineConfig,
    variants: list[dict[str, str]],
    batch: Annotated[
        Counts, typer.Option(help="Requests at once, 1 and 8 if not given; repeatable.")
    ] = None,
    context: Annotated[
        Counts,
        typer.Option(help="Tokens before decoding, 64 if not given; repeatable."),
    ] = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
    prefill: Annotated[
        Counts,
        typer.Option(help="Prompt lengths to prefill alone, 512 if not given; repeatable."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Runs of each point in each round.")] = 3,
    rounds: Annotated[int, typer.Option(help="Rounds; with several engines A B A B.")] = 2,
    vs: Annotated[
        list[str] | None,
        typer.Option(help="A peer: llama.cpp, or with its own file llama.cpp=PATH; repeatable."),
    ] = None,
    peer_python: Annotated[
        list[str] | None,
        typer.Option(
            help="Python that peers are installed into: PATH, or NAME=PATH for one; repeatable.",
            envvar="POLYPATH_PEER_PYTHON",
        ),
    ] = None,
    busy: Annotated[
        int, typer.Option(help="Measure again beside this many busy processes, one a core.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prefill and decode rates in process, medians over all runs; peers take turns in processes of
    their own. --runner and the like may be given several times, to compare paths in one run.
    """
    from ..bench_busy import check_busy
    from ..bench_peers import Peer, peer_pythons
    from ..bench_run import Bench
    from ..bench_view import render_bench

    workloads = _workloads(batch or [1, 8], context or [64], new_tokens, prefill or [512])
    _check_counts(repeats, rounds)
    check_busy(busy)
    pythons = peer_pythons(peer_python or ())
    peers = [
        Peer(spec, python=pythons.get(spec.partition("=")[0], pythons.get(""))) for spec in vs or ()
    ]
    todo = Bench(
        model=config.model,
        contenders=[_contender(config, variant, variants) for variant in variants],
        peers=peers,
        workloads=workloads,
        repeats=repeats,
        rounds=rounds,
        busy=busy,
    )
    result = todo.run()
    if as_json:
        typer.echo(json.dumps(_report(todo, result), indent=1))
    else:
        render_bench(result.rows, _footer(todo, result))


def _workloads(
    batches: list[int], contexts: list[int], new_tokens: int, prefills: list[int]
) -> list[Workload]:
    """Prompt lengths alone, then each batch at each context; 0 prefills nothing alone."""
    from ...runtime.bench import Workload

    if min(*batches, *contexts, new_tokens - 1, 1) < 1 or min(prefills) < 0:
        raise typer.BadParameter(
            "--batch and --context must be at least 1, --new-tokens at least 2, --prefill at "
            "least 1 (or 0 to leave it out)"
        )
    alone = [Workload(batch=1, prompt_tokens=n, new_tokens=1) for n in prefills if n]
    return alone + [
        Workload(batch=n, prompt_tokens=length, new_tokens=new_tokens)
        for length in contexts
        for n in batches
    ]


def _check_counts(repeats: int, rounds: int) -> None:
    if repeats < 1 or rounds < 1:
        raise typer.BadParameter(f"--repeats {repeats} --rounds {rounds}: each must be at least 1")


def _contender(
    config: EngineConfig, variant: dict[str, str], variants: list[dict[str, str]]
) -> Contender:
    import torch

    from ..bench_run import Contender
    from ..engine_here import build_engine

    built = build_engine(replace(config, **variant))
    return Contender(variant_name(variant, variants), built, torch.get_num_threads())


def _report(todo: Bench, result: BenchResult) -> dict[str, Any]:  # Any: plain JSON
    return {
        "hardware": todo.contenders[0].engine.hardware.to_json(),
        "plans": {c.name: c.engine.plan.to_json() for c in todo.contenders},
        "peers": {p.name: {"version": p.version, "settings": p.settings} for p in todo.peers},
        "ceilings": asdict(result.top),
        "busy": result.busy,
        "load_average": result.load_average,
        "rows": [asdict(row) for row in result.rows],
    }


def _footer(todo: Bench, result: BenchResult) -> list[str]:
    from ..bench_view import ceilings_line, label

    plans = [f"{c.name}: plan {c.engine.plan.fingerprint()}" for c in todo.contenders]
    peers = [
        f"{p.name}: {p.version}; "
        + "; ".join(
            f"{label(w)} {s}" for w, s in zip(todo.workloads, p.settings or (), strict=True)
        )
        for p in todo.peers
    ]
    before, after = result.load_average
    machine = todo.contenders[0].engine.plan.device_name
    load = f"load {before:.1f} before, {after:.1f} after"
    return [f"{machine}; {ceilings_line(result.top)}; {load}", *plans, *peers]


bench.command("engine")(engine)
bench.command("quality")(quality)
