"""`polypath bench`: measures, and says on what."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ...runtime.config import EngineConfig
from .engine_options import engine_options

if TYPE_CHECKING:
    from ...runtime.bench import Measurement, Workload
    from ...runtime.engine import Engine

bench = typer.Typer(no_args_is_help=True, help="Measure engines.")


@engine_options
def engine(
    config: EngineConfig,
    batch: Annotated[
        list[int] | None, typer.Option(help="Requests at once, 1 and 8 if not given; repeatable.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 64,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
    prefill: Annotated[
        list[int] | None,
        typer.Option(help="Prompt lengths to prefill alone, 512 if not given; repeatable."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Runs of each point in each round.")] = 3,
    rounds: Annotated[int, typer.Option(help="Rounds; with peers A B A B.")] = 2,
    vs: Annotated[
        list[str] | None, typer.Option(help="An installed peer, such as transformers; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prefill and decode rates in process, medians over all runs; peers take turns in processes of
    their own.
    """
    from ...runtime.bench import Workload, ceilings, measure
    from ..bench_peers import Peer
    from ..bench_view import Row, render_bench
    from ..engine_here import build_engine

    workloads = [
        *(Workload(batch=1, prompt_tokens=n, new_tokens=1) for n in prefill or (512,)),
        *(
            Workload(batch=n, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
            for n in batch or (1, 8)
        ),
    ]
    peers = [Peer(name) for name in vs or ()]
    built = build_engine(config)
    measure(built, Workload(batch=1, prompt_tokens=16, new_tokens=4), seed=-1)  # first touches
    ours: list[list[Measurement]] = [[] for _ in workloads]
    for turn in range(rounds):
        _run_ours(built, workloads, ours, repeats, turn)
        for peer in peers:
            peer.run(config.model, built.plan.num_threads, workloads, repeats)
    top = ceilings(built.plan.num_threads)
    rows = [Row.of("polypath", runs) for runs in ours]
    rows += [Row.of(peer.name, runs) for peer in peers for runs in peer.measurements()]
    if as_json:
        report = {
            "hardware": built.hardware.to_json(),
            "plan": built.plan.to_json(),
            "ceilings": asdict(top),
            "rows": [asdict(row) for row in rows],
        }
        typer.echo(json.dumps(report, indent=1))
    else:
        render_bench(built.plan, top, rows)


def _run_ours(
    built: Engine,
    workloads: list[Workload],
    into: list[list[Measurement]],
    repeats: int,
    turn: int,
) -> None:
    from ...runtime.bench import measure

    for workload, runs in zip(workloads, into, strict=True):
        runs += [measure(built, workload, seed=turn * repeats + i) for i in range(repeats)]


bench.command("engine")(engine)
