"""Compares a graph runner with eager on the same kernels: captured at the shortest lengths, run at
the longest, with everything that graphs compute poisoned in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from polypath.kernels.cpu.library import Library, load
from polypath.runtime.build_context import BuildContext
from polypath.runtime.engine import Engine
from polypath.runtime.forward_batch import ForwardBatch
from polypath.runtime.request import Request
from polypath.runtime.runners.eager import EagerRunner
from polypath.runtime.runners.graph import GraphRunner
from polypath.runtime.runners.piecewise import PiecewiseRunner
from polypath.runtime.runners.runner import Reason, RunnerParts
from polypath.runtime.runners.static_batch import SCRATCH_PAGE
from polypath.runtime.scheduler import RequestState, ScheduledRow
from polypath.tests.driving import build_engine

LONGEST = 60  # tokens of a sequence
ROW_COUNTS = (8, 1, 3, 8, 2, 5)


@dataclass(frozen=True, slots=True)
class Bench:
    """An engine's parts, to build runners from."""

    engine: Engine
    parts: RunnerParts
    library: Library | None

    @property
    def eager(self) -> EagerRunner:
        return EagerRunner(self.parts.model, self.parts.kv, self.parts.attention)


def bench(model: Path, **options: Any) -> Bench:
    """The parts of an engine that runs eagerly."""
    engine = build_engine(model, pages=80, runner="eager", **options)
    plan = engine.plan
    library = None if plan.native_kernels is None else load(plan.native_kernels)
    eager = engine._runner._runners[next(iter(plan.paths))][-1]
    assert isinstance(eager, EagerRunner)
    parts = RunnerParts(
        model=engine.model,
        kv=engine.kv,
        attention=eager._attention,
        context=BuildContext(
            model=engine.model.config,
            dtype=getattr(torch, plan.dtype),
            device=torch.device(plan.device),
            library=library,
        ),
        capture_sizes=(1, 2, 4, 8),
        max_tokens=64,
        max_rows=8,
        max_pages=-(-plan.max_model_len // plan.page_size),
    )
    return Bench(engine, parts, library)


def problems(
    found: Bench,
    runner: GraphRunner | PiecewiseRunner,
    tokens: int = 1,
    *,
    row_counts: Sequence[int] = ROW_COUNTS,
    longest: int = LONGEST,
) -> list[str]:
    """What is wrong with a runner whose graphs are captured; empty when it is right.

    Steps of `tokens` new tokens a row, over row counts that grow and shrink, after up to `longest`
    tokens.
    """
    wrong: list[str] = []
    states = _states(found, max(row_counts), longest)
    for step, rows in enumerate(row_counts):
        scheduled = [ScheduledRow(state, tokens) for state in states[:rows]]
        batch = ForwardBatch.build(
            scheduled, page_size=found.parts.kv.page_size, device=found.parts.context.device
        )
        wanted = range(0, batch.num_tokens, 1 + step % 2)  # all, or some
        batch = batch.with_logits_rows(wanted)
        if runner.why_not(batch) is not Reason.PADDED_TOO_MUCH:
            wrong += [
                f"step {step}, {rows} rows: {text}" for text in _compare(found, runner, batch)
            ]
        for state in states[:rows]:
            state.num_computed += tokens
    return wrong


def _compare(found: Bench, runner: GraphRunner | PiecewiseRunner, batch: ForwardBatch) -> list[str]:
    layers = found.parts.kv.layers
    with torch.inference_mode():
        before = [layer.clone() for layer in layers]
        expected = found.eager.run(batch).values.clone()
        after = [layer.clone() for layer in layers]
        for layer, old in zip(layers, before, strict=True):
            layer.copy_(old)
        runner.mechanism.poison()
        logits = runner.run(batch)
    exact = found.library is not None
    same = torch.equal if exact else _near
    wrong = [] if same(logits.values, expected) else ["logits differ from eager"]
    if logits.best is not None and not torch.equal(logits.best, logits.values.argmax(dim=-1)):
        wrong.append("the largest logits are elsewhere")
    live = SCRATCH_PAGE + 1
    if not all(same(a[live:], b[live:]) for a, b in zip(layers, after, strict=True)):
        wrong.append("keys and values differ from eager")
    return wrong + _padding(runner)


def _near(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def _padding(runner: GraphRunner | PiecewiseRunner) -> list[str]:
    """Padding that points into a page of somebody: wrong even where it is not computed."""
    if isinstance(runner, PiecewiseRunner):
        statics = [static for static, _ in runner._graphs.values()]
    else:
        statics = [bucket.static for bucket in runner._buckets.values()]
    page_size = runner._parts.kv.page_size
    for static in statics:
        slots, pages = static.padding()
        if (slots // page_size != SCRATCH_PAGE).any() or (pages != SCRATCH_PAGE).any():
            return ["padding points into a live page"]
    return []


def _states(found: Bench, count: int, longest: int) -> Sequence[RequestState]:
    """Requests with pages dealt at random and some tokens computed already, of unequal lengths."""
    rng = Random(0)
    pool = list(range(1, found.engine.pages.num_usable + 1))
    rng.shuffle(pool)
    vocab = found.engine.model.config.vocab_size
    states = []
    for i in range(count):
        ids = tuple(rng.randrange(4, vocab) for _ in range(longest + 80))
        state = RequestState(Request(id=str(i), prompt_ids=ids), i, len(ids) + 1)
        state.pages = [pool.pop() for _ in range(found.engine.pages.pages_for(len(ids)))]
        states.append(state)
        first = ScheduledRow(state, 1 + rng.randrange(longest))
        batch = ForwardBatch.build(
            [first], page_size=found.parts.kv.page_size, device=found.parts.context.device
        )
        with torch.inference_mode():
            found.eager.run(batch)
        state.num_computed += first.num_tokens
    return states
