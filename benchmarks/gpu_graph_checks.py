"""What must hold of graphs and whole paths on a card: graphs equal eager with everything poisoned,
planted faults are seen, paths equal a plain forward.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gpu_checks import Check

from polypath.runtime.build_context import BuildContext
from polypath.runtime.config import EngineConfig
from polypath.runtime.forward_batch import ForwardBatch
from polypath.runtime.full_check import check_all
from polypath.runtime.graphs.cuda import CudaGraph
from polypath.runtime.graphs.mechanism import GraphMechanism, ReplayError
from polypath.runtime.runners.cuda_graph import CudaGraphRunner
from polypath.runtime.runners.graph import GraphRunner
from polypath.runtime.runners.piecewise_cuda_graph import PiecewiseCudaGraphRunner
from polypath.runtime.runners.static_batch import StaticBatch


def check_paths(device: str) -> Iterator[Check]:
    """Every path that the planner accepts here, a tiny model, against a plain forward."""
    with tempfile.TemporaryDirectory() as folder:
        _tiny_model(Path(folder))
        config = EngineConfig(model=folder, device=device, kv_bytes=4 << 20, max_num_seqs=8)
        for found in check_all(config):
            if found.is_refused:
                continue
            worst = max((result.error for result in found.results), default=None)
            paths = ", ".join(dict.fromkeys(found.paths.values()))
            yield Check(
                name=paths, passed=found.passed, note=found.problem or found.wish, value=worst
            )


def _tiny_model(folder: Path) -> None:
    from polypath.tests import tiny_models

    tiny_models.random(folder, hidden=256)


Fault = Callable[[GraphRunner], Any]  # Any: patches of several kinds


def faults() -> dict[str, Fault]:
    """What may go wrong with a graph, planted in a runner whose graphs are captured."""
    fill = StaticBatch.fill_tokens

    def into_live_page(static: StaticBatch, batch: ForwardBatch) -> None:
        fill(static, batch)
        static._slots[batch.num_tokens :] = batch.slots[0]

    def moved(static: StaticBatch, batch: ForwardBatch) -> None:
        fill(static, batch)
        static._positions = static._positions.clone()

    def stale(runner: GraphRunner) -> Any:
        kind = type(next(iter(runner._buckets.values())).attention)
        return patch.object(kind, "refresh", lambda self, batch: None)

    return {
        "stale lengths": stale,
        "wrong bucket": lambda runner: patch.object(GraphRunner, "_size_for", lambda s, rows: 1),
        "padding into a live page": lambda r: patch.object(
            StaticBatch, "fill_tokens", into_live_page
        ),
        "moved input": lambda runner: patch.object(StaticBatch, "fill_tokens", moved),
    }


def check_graphs(device: str) -> Iterator[Check]:
    """Graphs equal eager, with all that they compute poisoned before each replay; and each planted
    fault is seen. On a CPU the same runners, over recordings and a faked package.
    """
    from polypath.tests.graph_check import problems

    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        _tiny_model(Path(folder))
        for runner_name in ("whole", "pieces"):
            found, mechanism = _bench(Path(folder), device)
            runner = RUNNERS[runner_name](mechanism, found.parts)
            for size in runner.wanted:
                runner.capture(size)
            wrong = problems(found, runner, tokens=1 if runner_name == "whole" else 8)
            yield Check(name=runner.name, passed=not wrong, note="; ".join(wrong[:3]))
            if isinstance(runner, GraphRunner):
                for name, plant in faults().items():
                    with ExitStack() as stack:
                        stack.enter_context(plant(runner))
                        seen = _seen(partial(problems, found, runner))
                    yield Check(name=f"planted: {name}", passed=bool(seen), note=seen)


def _seen(look: Callable[[], list[str]]) -> str:
    """The first problem, or the error that it became."""
    try:
        return next(iter(look()), "")
    except (ReplayError, AssertionError, RuntimeError) as error:
        return str(error).partition("\n")[0] or type(error).__name__


RUNNERS = {"whole": CudaGraphRunner, "pieces": PiecewiseCudaGraphRunner}


def _bench(folder: Path, device: str) -> tuple[Any, GraphMechanism]:  # Any: tests' `Bench`
    """Parts to build runners from, and what captures."""
    from polypath.tests.graph_check import Bench, bench

    if device == "cuda":
        return bench(folder, device=device, dtype="float32"), CudaGraph()
    from polypath.runtime.attention.flash_packages import VllmPackage
    from polypath.runtime.attention.vllm_flash_attn import VllmFlashAttnBackend
    from polypath.tests.driving import build_yardstick
    from polypath.tests.fake_flash_attn import Vllm
    from polypath.tests.graph_engine import FakedCudaGraph, parts_of

    engine = build_yardstick(folder, pages=80, max_num_seqs=8, max_num_batched_tokens=64)

    def faked(context: BuildContext) -> VllmFlashAttnBackend:
        package = VllmPackage(Vllm(2, 3), 3)
        return VllmFlashAttnBackend(context.model, context.dtype, context.device, package)

    return Bench(engine, parts_of(engine, faked), None), FakedCudaGraph()
