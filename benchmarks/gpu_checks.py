"""What must hold on a card before any figure of it counts: kernels against float64, backends and
graphs against eager and the yardstick, planted faults, rows blind to their neighbours.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from polypath.runtime.attention import registry as attention_registry
from polypath.runtime.attention.backend import AttentionBackend
from polypath.runtime.attention.torch_sdpa import TorchSdpaBackend
from polypath.runtime.build_context import BuildContext
from polypath.runtime.config import EngineConfig
from polypath.runtime.errors import EngineError
from polypath.runtime.forward_batch import ForwardBatch
from polypath.runtime.full_check import check_all
from polypath.runtime.graphs.mechanism import ReplayError
from polypath.runtime.kv.pool import KVPool
from polypath.runtime.ladder import CapturingRunner
from polypath.runtime.linear.dense import DenseLinear
from polypath.runtime.ops.ops import Ops
from polypath.runtime.ops.torch import TorchOps
from polypath.runtime.request import Request
from polypath.runtime.runners.graph import GraphRunner
from polypath.runtime.runners.static_batch import StaticBatch
from polypath.runtime.scheduler import RequestState, ScheduledRow

BOUNDS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of one kernel against float64, relative to the largest value."""

PAGE = 16
LENGTHS = ((1, 1), (1, 700), (33, 40), (1, 17), (5, 300), (1, 255))  # (new tokens, all tokens)
DECODES = ((1, 1), (1, 700), (1, 17), (1, 1025), (1, 255), (1, 4096))


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that was looked at; `value` is an error where there is a number."""

    name: str
    passed: bool
    note: str = ""
    value: float | None = None


def tables(context: BuildContext) -> list[Ops]:
    """The ops tables of our kernels that this device runs."""
    if context.device.type != "cuda":
        return [TorchOps()]
    from polypath.runtime.ops.triton import TritonOps

    return [TritonOps()]


def check_ops(context: BuildContext) -> Iterator[Check]:
    """Each operation of each table against torch in float64, on the same values."""
    for table in tables(context):
        for dtype in BOUNDS:
            if context.device.type == "cpu" and dtype != torch.float32:
                continue
            for name, ours, exact in _op_pairs(table, dtype, context.device):
                error = _error(ours, exact)
                label = f"{table.name}.{name} {str(dtype)[6:]}"
                yield Check(name=label, passed=error <= BOUNDS[dtype], value=error)


def _op_pairs(
    ops: Ops, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator(device).manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    twin, wide = TorchOps(), torch.float64
    x, residual, weight = random(37, 512), random(37, 512), random(512)
    yield "norm", ops.norm(x, weight, 1e-5), twin.norm(x.to(wide), weight.to(wide), 1e-5)
    ours = ops.add_norm(x.clone(), residual.clone(), weight, 1e-5)
    exact = twin.add_norm(x.to(wide), residual.to(wide), weight.to(wide), 1e-5)
    yield "add_norm", ours[0], exact[0]
    yield "add_norm sum", ours[1], exact[1]
    gate_up = random(37, 2 * 768)
    yield "silu_mul", ops.silu_mul(gate_up), twin.silu_mul(gate_up.to(wide))
    positions = torch.arange(37, device=device) * 31
    inverse = 10_000.0 ** -(torch.arange(0, 64, 2, device=device) / 64)
    cos, sin = twin.rope(positions, inverse.float())
    qkv, norm = random(37, 8 * 64), random(64)
    pool = torch.zeros(8, 2, PAGE, 2, 64, dtype=dtype, device=device)
    slots = torch.arange(37, device=device) + PAGE
    for norms in (None, (norm, norm, 1e-5)):
        kv, wide_kv = pool.clone(), pool.to(wide)
        q = ops.qkv_norm_rope_store(qkv, (cos, sin), norms, kv, slots, 4)
        wide_norms = None if norms is None else (norm.to(wide), norm.to(wide), 1e-5)
        turn = (cos.to(wide), sin.to(wide))
        exact_q = twin.qkv_norm_rope_store(qkv.to(wide), turn, wide_norms, wide_kv, slots, 4)
        kind = "" if norms is None else " with norms"
        yield f"qkv_norm_rope_store{kind}", q, exact_q
        yield f"stored keys and values{kind}", kv, wide_kv
    found = ops.logits(DenseLinear(random(1000, 64), None), random(5, 64))
    if found.best is not None:
        yield "argmax", found.best, found.values.argmax(dim=-1)


def _error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    difference = (ours.double() - exact.double()).abs().max()
    return float(difference.nan_to_num(nan=torch.inf) / exact.double().abs().max().clamp_min(1e-30))


def backends(context: BuildContext) -> Iterator[tuple[str, AttentionBackend | str]]:
    """Each attention backend of this device, or why it is not there."""
    for candidate in attention_registry.CANDIDATES:
        capability = candidate.capability
        if context.device.type not in capability.devices or not capability.built:
            continue
        if capability.native_kernels:
            continue
        try:
            yield capability.name, candidate.load().build(context)
        except (ImportError, OSError, RuntimeError, EngineError) as error:
            yield capability.name, str(error).partition("\n")[0]


def batch_of(
    lengths: tuple[tuple[int, int], ...], device: torch.device
) -> tuple[ForwardBatch, int]:
    """A batch of rows (new tokens, all tokens) over pages dealt backwards; and how many pages."""
    rows, page = [], sum(-(-total // PAGE) for _, total in lengths)
    num_pages = page + 1
    for i, (new, total) in enumerate(lengths):
        state = RequestState(Request(id=str(i), prompt_ids=(5,) * total), i, total + 1)
        for _ in range(-(-total // PAGE)):
            state.pages.append(page)
            page -= 1
        state.num_computed = total - new
        rows.append(ScheduledRow(state, new))
    return ForwardBatch.build(rows, page_size=PAGE, device=device), num_pages


def check_attention(context: BuildContext) -> Iterator[Check]:
    """Each backend against torch_sdpa in float64, on mixed batches."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        if context.device.type == "cpu" and dtype != torch.float32:
            continue
        here = replace(context, dtype=dtype)
        for name, backend in backends(here):
            label = f"{name} {str(dtype)[6:]}"
            if isinstance(backend, str):
                yield Check(name=label, passed=True, note=f"not here: {backend}")
                continue
            try:
                error = _attention_error(backend, here)
            except (RuntimeError, ValueError, AssertionError) as refused:
                is_ours = name in ("triton", "torch_sdpa")
                text = str(refused).partition("\n")[0]
                yield Check(name=label, passed=not is_ours, note=f"refused: {text}")
                continue
            yield Check(name=label, passed=error <= BOUNDS[dtype], value=error)


def _attention_error(backend: AttentionBackend, context: BuildContext) -> float:
    batch, num_pages = batch_of(LENGTHS, context.device)
    q, kv = _random_attention(context, batch.num_tokens, num_pages)
    exact = TorchSdpaBackend(context.model, torch.float64)
    exact.plan(batch)
    expected = exact.attend(q.double(), kv.double(), 0)
    backend.plan(batch)
    return _error(backend.attend(q, kv, 0), expected)


def _random_attention(
    context: BuildContext, num_tokens: int, num_pages: int
) -> tuple[torch.Tensor, torch.Tensor]:
    model, device = context.model, context.device
    pool = KVPool(
        replace(model, num_layers=1),
        num_pages=num_pages,
        page_size=PAGE,
        dtype=context.dtype,
        device=device,
    )
    generator = torch.Generator(device).manual_seed(2)
    pool.layers[0].copy_(torch.randn(pool.layers[0].shape, generator=generator, device=device))
    shape = (num_tokens, model.num_heads, model.head_dim)
    q = torch.randn(shape, generator=generator, device=device).to(context.dtype)
    return q, pool.layers[0]


def check_invariance(context: BuildContext) -> Iterator[Check]:
    """Each row alone and among others: equal bits, where the backend claims it."""
    for name, backend in backends(context):
        if isinstance(backend, str):
            continue
        claims = next(
            c.capability.batch_invariant
            for c in attention_registry.CANDIDATES
            if c.capability.name == name
        )
        if not claims:
            continue
        for kind, lengths in (("decode", DECODES), ("mixed", LENGTHS)):
            wrong = _rows_that_change(backend, context, lengths)
            note = f"rows {wrong} change" if wrong else f"{len(lengths)} rows"
            yield Check(name=f"{name} {kind}", passed=not wrong, note=note)


def _rows_that_change(
    backend: AttentionBackend, context: BuildContext, lengths: tuple[tuple[int, int], ...]
) -> list[int]:
    batch, num_pages = batch_of(lengths, context.device)
    q, kv = _random_attention(context, batch.num_tokens, num_pages)
    backend.plan(batch)
    together = backend.attend(q, kv, 0).clone()
    wrong = []
    for i, (new, total) in enumerate(lengths):
        first, last = batch.query_starts[i], batch.query_starts[i + 1]
        alone = replace(
            batch,
            page_table=batch.page_table[i : i + 1].contiguous(),
            query_starts=(0, new),
            kv_lens=(total,),
        )
        backend.plan(alone)
        if not torch.equal(backend.attend(q[first:last].contiguous(), kv, 0), together[first:last]):
            wrong.append(i)
    return wrong


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
    fault is seen.
    """
    from polypath.tests.graph_check import bench, problems

    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        _tiny_model(Path(folder))
        for runner_name in ("whole", "pieces"):
            found = bench(Path(folder), device=device, dtype="float32")
            runner = _graph_runner(runner_name, found.parts, device)
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


def _graph_runner(name: str, parts: Any, device: str) -> Any:  # Any: either kind of graph runner
    if device == "cuda":
        from polypath.runtime.runners import cuda_graph, piecewise_cuda_graph

        made = (cuda_graph if name == "whole" else piecewise_cuda_graph).build(parts)
    else:
        from polypath.runtime.runners import cpu_graph, piecewise_cpu_graph

        made = (cpu_graph if name == "whole" else piecewise_cpu_graph).build(parts)
    assert isinstance(made, CapturingRunner)
    return made
