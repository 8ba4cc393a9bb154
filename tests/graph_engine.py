"""A tiny engine that runs the GPU's graph runners on a CPU: torch ops, an attention backend whose
package is faked, graphs that are recordings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from polypath.runtime.attention.backend import AttentionBackend
from polypath.runtime.build_context import BuildContext
from polypath.runtime.engine import Engine
from polypath.runtime.forward_mode import ForwardMode
from polypath.runtime.graphs.cuda import CudaGraph
from polypath.runtime.graphs.mechanism import GraphMechanism
from polypath.runtime.ladder import Rung, capture_graphs
from polypath.runtime.model_runner import ModelRunner
from polypath.runtime.runners.cuda_graph import CudaGraphRunner
from polypath.runtime.runners.eager import EagerRunner
from polypath.runtime.runners.piecewise_cuda_graph import PiecewiseCudaGraphRunner
from polypath.runtime.runners.runner import RunnerParts
from polypath.tests.driving import YARDSTICK, build_engine
from polypath.tests.fake_cuda import FakeCuda

MakeBackend = Callable[[BuildContext], AttentionBackend]
MakeMechanism = Callable[[], GraphMechanism]
RUNNERS = {
    ForwardMode.DECODE: "cuda_graph",
    ForwardMode.PREFILL: "piecewise_cuda_graph",
    ForwardMode.MIXED: "piecewise_cuda_graph",
}


class FakedCudaGraph(CudaGraph):
    """`CudaGraph` itself, over the stand-in for torch.cuda."""

    def __init__(self) -> None:
        self.fake = FakeCuda()
        super().__init__(self.fake)

    def poison(self) -> None:
        for notes in self.fake.notes:
            notes.poison()


def parts_of(engine: Engine, backend: MakeBackend) -> RunnerParts:
    """What runners over the engine's model and pool are built from."""
    eager = engine._runner._runners[ForwardMode.DECODE][-1]
    assert isinstance(eager, EagerRunner)
    plan, kv = engine.plan, engine.kv
    context = BuildContext(
        model=engine.model.config, dtype=kv.layers[0].dtype, device=kv.layers[0].device
    )
    return RunnerParts(
        model=engine.model,
        kv=kv,
        attention=backend(context),
        context=context,
        capture_sizes=(1, 2, 4, 8),
        max_tokens=plan.max_num_batched_tokens,
        max_rows=plan.max_num_seqs,
        max_pages=-(-plan.max_model_len // plan.page_size),
    )


def eager_engine(model: Path, backend: MakeBackend, **options: Any) -> Engine:
    """Every step eager, on that backend."""
    engine = build_engine(model, runner="eager", **{**YARDSTICK, **options})
    parts = parts_of(engine, backend)
    eager = EagerRunner(parts.model, parts.kv, parts.attention)
    engine._runner = ModelRunner(dict.fromkeys(engine.plan.paths, (eager,)))
    return engine


def graph_engine(
    model: Path, backend: MakeBackend, mechanism: MakeMechanism, **options: Any
) -> tuple[Engine, Rung]:
    """Decode steps on `CudaGraphRunner`, all others on `PiecewiseCudaGraphRunner`."""
    engine = build_engine(model, runner="eager", **{**YARDSTICK, **options})
    parts = parts_of(engine, backend)
    eager = EagerRunner(parts.model, parts.kv, parts.attention)
    whole = CudaGraphRunner(mechanism(), parts)
    pieces = PiecewiseCudaGraphRunner(mechanism(), parts)
    plan = engine.plan
    for mode, runner in RUNNERS.items():
        plan = plan.with_path(replace(plan.paths[mode], runner=runner))
    rung = capture_graphs(
        {
            ForwardMode.DECODE: (whole, pieces, eager),
            ForwardMode.PREFILL: (pieces, eager),
            ForwardMode.MIXED: (pieces, eager),
        },
        plan,
    )
    engine._runner = ModelRunner(rung.runners)
    return engine, rung
