"""Medians on a card, beside the copy and matmul ceilings of the same run."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from gpu_checks import PAGE, backends, batch_of, dtypes_of, tables
from random_checkpoint import SHAPES, RandomCheckpoint

from polypath.runtime.build_context import BuildContext
from polypath.runtime.config import EngineConfig, ModelConfig
from polypath.runtime.engine import Engine
from polypath.runtime.errors import PlanError
from polypath.runtime.forward_mode import ForwardMode
from polypath.runtime.planning.candidate import find
from polypath.runtime.request import Request, SamplingParams
from polypath.runtime.runners import registry as runner_registry
from polypath.runtime.runners.graph import GraphRunner
from polypath.runtime.startup import StartupEvent, start


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One median; `share` of the ceiling, where there is one. `milliseconds` None: not measured."""

    name: str
    milliseconds: float | None
    rate: float | None = None  # of bytes or operations a second
    unit: str = ""  # of the rate
    share: float | None = None
    replay_ms: float | None = None  # of the graph alone, where a step is timed
    note: str = ""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this device gives to torch itself."""

    copy_bytes_s: float  # read and written
    matmul_flops: float


def median_ms(run: Callable[[], object], device: torch.device) -> float:
    """On a card by triton.testing.do_bench, else of five runs."""
    if device.type == "cuda":
        from triton.testing import do_bench  # pyright: ignore[reportMissingImports]

        found: Any = do_bench(run, warmup=10, rep=60, return_mode="median")  # Any: or a list
        return float(found)
    return statistics.median(_seconds(run) for _ in range(5)) * 1000


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure_ceilings(device: torch.device, *, small: bool) -> tuple[Ceilings, list[Figure]]:
    """A copy far larger than the caches, and a large square product."""
    size, side = (1 << 20, 256) if small else (1 << 30, 8192)
    dtype = card_dtype(device)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_ms = median_ms(lambda: target.copy_(source), device)
    a = torch.randn(side, side, dtype=dtype, device=device)
    matmul_ms = median_ms(lambda: a @ a, device)
    found = Ceilings(2 * size / copy_ms * 1000, 2 * side**3 / matmul_ms * 1000)
    return found, [
        Figure(
            name=f"copy of {size >> 20} MiB",
            milliseconds=copy_ms,
            rate=found.copy_bytes_s,
            unit="B/s",
        ),
        Figure(
            name=f"matmul {side}^3 {str(dtype)[6:]}",
            milliseconds=matmul_ms,
            rate=found.matmul_flops,
            unit="FLOP/s",
        ),
    ]


def attention_figures(
    context: BuildContext, ceilings: Ceilings, *, small: bool
) -> Iterator[Figure]:
    """Each backend at decode (bytes of keys and values read) and at prefill (operations)."""
    decodes = ((2, 64),) if small else ((1, 1024), (32, 1024), (64, 1024), (8, 8192))
    for rows, length in decodes:
        yield from _decode_figures(context, ceilings, rows, length)
    yield from _prefill_figures(context, ceilings, 64 if small else 4096)


def _decode_figures(
    context: BuildContext, ceilings: Ceilings, rows: int, length: int
) -> Iterator[Figure]:
    model = context.model
    batch, num_pages = batch_of(((1, length),) * rows, context.device)
    q, kv = _tensors(context, batch.num_tokens, num_pages)
    num_bytes = 2 * rows * length * model.num_kv_heads * model.head_dim * context.dtype.itemsize
    for name, backend in backends(context):
        if isinstance(backend, str):
            continue
        backend.plan(batch)
        ms = median_ms(lambda backend=backend: backend.attend(q, kv, 0), context.device)
        rate = num_bytes / ms * 1000
        yield Figure(
            name=f"{name} decode, {rows} x {length}",
            milliseconds=ms,
            rate=rate,
            unit="B/s",
            share=rate / ceilings.copy_bytes_s,
        )


def _prefill_figures(context: BuildContext, ceilings: Ceilings, length: int) -> Iterator[Figure]:
    model = context.model
    batch, num_pages = batch_of(((length, length),), context.device)
    q, kv = _tensors(context, batch.num_tokens, num_pages)
    flops = 4 * model.num_heads * model.head_dim * length * (length + 1) / 2
    for name, backend in backends(context):
        if isinstance(backend, str):
            continue
        backend.plan(batch)
        ms = median_ms(lambda backend=backend: backend.attend(q, kv, 0), context.device)
        rate = flops / ms * 1000
        yield Figure(
            name=f"{name} prefill, {length}",
            milliseconds=ms,
            rate=rate,
            unit="FLOP/s",
            share=rate / ceilings.matmul_flops,
        )


def _tensors(
    context: BuildContext, tokens: int, num_pages: int
) -> tuple[torch.Tensor, torch.Tensor]:
    model = context.model
    shape = (num_pages, 2, PAGE, model.num_kv_heads, model.head_dim)
    kv = torch.randn(shape, device=context.device).to(context.dtype)
    q = torch.randn(tokens, model.num_heads, model.head_dim, device=context.device)
    return q.to(context.dtype), kv


def ops_figures(context: BuildContext, ceilings: Ceilings, *, small: bool) -> Iterator[Figure]:
    """Each operation of our tables at the model's shape, by the bytes that it must move."""
    model, device, dtype = context.model, context.device, context.dtype
    tokens = 8 if small else 2048
    x = torch.randn(tokens, model.hidden_size, device=device).to(dtype)
    residual, weight = x.clone(), torch.ones(model.hidden_size, dtype=dtype, device=device)
    gate_up = torch.randn(tokens, 2 * model.intermediate_size, device=device).to(dtype)
    for table in tables(context):
        runs: dict[str, tuple[Callable[[], Any], int]] = {
            "norm": (lambda t=table: t.norm(x, weight, 1e-5), 2 * x.nbytes),
            "add_norm": (lambda t=table: t.add_norm(x, residual, weight, 1e-5), 4 * x.nbytes),
            "silu_mul": (lambda t=table: t.silu_mul(gate_up), gate_up.nbytes * 3 // 2),
        }
        for name, (run, num_bytes) in runs.items():
            ms = median_ms(run, device)
            rate = num_bytes / ms * 1000
            yield Figure(
                name=f"{table.name}.{name}, {tokens} tokens",
                milliseconds=ms,
                rate=rate,
                unit="B/s",
                share=rate / ceilings.copy_bytes_s,
            )


def engine_figures(
    name: str, device: torch.device, batches: tuple[int, ...], *, context_len: int, steps: int
) -> Iterator[Figure]:
    """Random weights of a known shape: start, then decode steps of the whole engine. A step's time
    includes the host's; the graph's replay alone stands beside it.
    """
    seconds: dict[str, float] = {}

    def note(event: StartupEvent) -> None:
        if event.seconds is not None:
            seconds[event.stage] = event.seconds

    _free(device)
    length = context_len + steps + 64
    config = _config(name, device, max(batches), length)
    try:
        started = start(config, on_progress=note, checkpoint=RandomCheckpoint(name, device))
    except PlanError as error:
        why = str(error).partition("\n")[0]
        yield Figure(name=f"{name}: engine", milliseconds=None, note=f"not here: {why}")
        return
    engine = Engine(started)
    yield from _start_figures(engine, name, seconds, device)
    for batch in batches:
        yield Figure(
            name=f"{name}: engine step, {batch} x {context_len}",
            milliseconds=_step_ms(engine, batch, context_len, steps),
            replay_ms=_replay_ms(engine, batch, device),
            note=engine.plan.path_name(ForwardMode.DECODE),
        )


def _config(name: str, device: torch.device, batch: int, length: int) -> EngineConfig:
    dtype = card_dtype(device)
    per_token = SHAPES[name].kv_bytes_per_token(dtype.itemsize)
    return EngineConfig(
        model=name,
        device=device.type,
        dtype=str(dtype)[6:],
        max_model_len=length,
        max_num_seqs=batch if device.type == "cpu" else None,  # a card captures all its graphs
        kv_bytes=(batch + 1) * length * per_token,
        prefix_cache=False,
        calibration=False,
    )


def _start_figures(
    engine: Engine, name: str, seconds: dict[str, float], device: torch.device
) -> Iterator[Figure]:
    """What graphs cost the start, and all decode graphs once more by themselves."""
    if "graphs" not in seconds:
        return
    path = engine.plan.path_name(ForwardMode.DECODE)
    milliseconds = seconds["graphs"] * 1000
    yield Figure(name=f"{name}: start, all graphs", milliseconds=milliseconds, note=path)
    runner = engine._runner._runners[ForwardMode.DECODE][0]
    if not isinstance(runner, GraphRunner):
        return
    fresh: Any = find(runner_registry.CANDIDATES, runner.name).load().build(runner._parts)
    start = time.perf_counter()
    for size in fresh.wanted:
        if not fresh.covers(size):
            fresh.capture(size)
    if device.type == "cuda":
        torch.cuda.synchronize()
    yield Figure(
        name=f"{name}: capture of all decode graphs",
        milliseconds=(time.perf_counter() - start) * 1000,
        note=f"{len(fresh.captured)} sizes up to {max(fresh.wanted)}",
    )


def _free(device: torch.device) -> None:
    """Give back what the engine before this one held: the next plan counts what is free."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _step_ms(engine: Engine, batch: int, context_len: int, steps: int) -> float:
    """Median of full decode steps; the first few are left out."""
    vocab = engine.model.config.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=steps + 8, ignore_eos=True)
    for i in range(batch):
        ids = tuple((7 * i + 13 * j) % vocab for j in range(context_len))
        engine.submit(Request(id=f"b{batch}-{i}", prompt_ids=ids, sampling=params))
    found = []
    while engine.has_work():
        start = time.perf_counter()
        outputs = engine.step()
        if failed := [output.error for output in outputs if output.error is not None]:
            raise RuntimeError(f"a step failed: {failed[0]}")
        if len(outputs) == batch and all(o.position > 3 for o in outputs):
            found.append(time.perf_counter() - start)
    if not found:
        raise RuntimeError(f"no step of {batch} decoding rows was seen; is the KV pool too small?")
    return statistics.median(found) * 1000


def _replay_ms(engine: Engine, batch: int, device: torch.device) -> float | None:
    """The graph of that batch alone, on what its last step left in its inputs."""
    runner = engine._runner._runners[ForwardMode.DECODE][0]
    if not isinstance(runner, GraphRunner):
        return None
    bucket = runner._buckets[runner._size_for(batch)]
    inputs = bucket.inputs()
    return median_ms(lambda: bucket.graph.replay(batch, inputs), device)


def attention_context(name: str, device: torch.device) -> BuildContext:
    """A context of one of the shapes, in the dtype that is measured."""
    model: ModelConfig = SHAPES[name]
    return BuildContext(model=model, dtype=card_dtype(device), device=device)


def card_dtype(device: torch.device) -> torch.dtype:
    """What models run in there: bfloat16 where the card has it."""
    return dtypes_of(device)[-1]
