"""The KV pool of a card gets what a trial measures to be left: driven here with made-up numbers of
a device, down to a whole start on the CPU that believes to be on one.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from polypath.runtime import startup
from polypath.runtime.attention.flash_packages import VllmPackage
from polypath.runtime.attention.vllm_flash_attn import VllmFlashAttnBackend
from polypath.runtime.build_context import BuildContext
from polypath.runtime.config import EngineConfig
from polypath.runtime.device_memory import CudaMemory
from polypath.runtime.engine import Engine
from polypath.runtime.forward_mode import ForwardMode
from polypath.runtime.graphs.mechanism import CaptureError
from polypath.runtime.kv.pool import KVPool
from polypath.runtime.largest_step import largest_rows
from polypath.runtime.planning.hardware import load_hardware
from polypath.runtime.planning.plan import ExecutionPlan
from polypath.runtime.planning.planner import plan as make_plan
from polypath.runtime.planning.rules import native_variant
from polypath.runtime.runners.cuda_graph import CudaGraphRunner
from polypath.runtime.runners.eager import EagerRunner
from polypath.runtime.runners.piecewise_cuda_graph import PiecewiseCudaGraphRunner
from polypath.runtime.runners.runner import Runner
from polypath.runtime.trial import Trial, has_own_pool, run_trial, with_measured_pool
from polypath.tests.driving import assert_same_answers, build_engine, build_yardstick, greedy, run
from polypath.tests.fake_flash_attn import Vllm
from polypath.tests.graph_engine import FakedCudaGraph, parts_of
from polypath.tests.graph_parity import sdpa
from polypath.tests.unit.planning.public_models import public_model

MIB, GIB = 1 << 20, 1 << 30


@dataclass(kw_only=True, slots=True)
class FakeMemory:
    """A device of which a step takes 7 MiB, and which says what it was asked."""

    free: int
    log: list[str] = field(default_factory=list)

    def free_bytes(self) -> int:
        self.log.append("free")
        return self.free

    def held_bytes(self) -> int:
        self.log.append("held")
        return 100 * MIB

    def watch(self) -> None:
        self.log.append("watch")

    def watched_bytes(self) -> int:
        self.log.append("watched")
        return 107 * MIB

    def peak_bytes(self) -> int:
        return 120 * MIB


# The pool.


@pytest.fixture(scope="module")
def h200() -> ExecutionPlan:
    return make_plan(load_hardware("h200"), public_model("Llama-3.1-8B"), EngineConfig(model="m"))


def trial_of(free: int) -> Trial:
    return Trial(step_bytes=GIB, graph_bytes=GIB, more_graph_bytes=GIB // 2, free_bytes=free)


def test_the_pool_gets_its_share_of_what_step_graphs_and_reserve_leave(h200: ExecutionPlan) -> None:
    found = with_measured_pool(h200, trial_of(120 * GIB), EngineConfig(model="m"))
    page = h200.kv_bytes // h200.num_pages
    room = 120 * GIB - GIB - GIB // 2 - h200.memory.reserve_bytes
    assert found.num_pages == int(0.9 * room) // page
    assert found.kv_bytes == found.num_pages * page
    assert found.max_model_len == h200.max_model_len
    (event,) = (event.message for event in found.events if event.stage == "kv_pool")
    assert f"KV pool of {found.num_pages} pages, {h200.num_pages} planned" in event
    assert "the largest step takes 1.00 GiB" in event
    half = with_measured_pool(h200, trial_of(120 * GIB), EngineConfig(model="m", memory_share=0.5))
    assert half.num_pages == int(0.5 * room) // page


def test_a_pool_too_small_for_the_planned_context_cuts_it_but_not_below_the_least(
    h200: ExecutionPlan,
) -> None:
    small = h200.memory.reserve_bytes + 2 * GIB
    found = with_measured_pool(h200, trial_of(small), EngineConfig(model="m"))
    assert found.max_model_len == (found.num_pages - 1) * found.page_size < h200.max_model_len
    assert f"max_model_len is {found.max_model_len} instead of" in found.events[-1].message
    nothing = with_measured_pool(h200, trial_of(GIB), EngineConfig(model="m"))
    assert nothing.max_model_len == 512
    asked = EngineConfig(model="m", max_model_len=4096)
    plan = make_plan(load_hardware("h200"), public_model("Llama-3.1-8B"), asked)
    assert with_measured_pool(plan, trial_of(GIB), asked).max_model_len == 4096


def test_a_pool_given_in_bytes_and_one_that_attention_copies_from_stay_as_planned(
    h200: ExecutionPlan,
) -> None:
    assert has_own_pool(h200, EngineConfig(model="m"))
    assert not has_own_pool(h200, EngineConfig(model="m", kv_bytes=GIB))
    path = replace(h200.paths[ForwardMode.PREFILL], attention_backend="torch_sdpa")
    assert not has_own_pool(h200.with_path(path), EngineConfig(model="m"))


# The trial.


def test_the_largest_step_is_as_large_as_the_plan_allows(h200: ExecutionPlan) -> None:
    rows = largest_rows(h200)
    assert len(rows) == h200.max_num_seqs
    assert sum(row.num_tokens for row in rows) == h200.max_num_batched_tokens
    assert all(row.samples for row in rows)
    longest = max(len(row.state.token_ids) for row in rows)
    assert longest == h200.max_model_len - 1
    assert {page for row in rows for page in row.state.pages} == {0}


def faked_fa3(context: BuildContext) -> VllmFlashAttnBackend:
    package = VllmPackage(Vllm(2, 3), 3)
    return VllmFlashAttnBackend(context.model, context.dtype, context.device, package)


def cuda_runners(engine: Engine, kv: KVPool) -> dict[ForwardMode, tuple[Runner, ...]]:
    parts = replace(parts_of(engine, sdpa), kv=kv)
    eager = EagerRunner(parts.model, kv, parts.attention)
    graphs = CudaGraphRunner(FakedCudaGraph(), parts)
    return {mode: (graphs, eager) for mode in engine.plan.paths}


def test_a_trial_measures_a_step_and_two_graphs_over_one_page(
    random_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_yardstick(random_llama, pages=60, max_num_seqs=8, max_num_batched_tokens=64)
    memory, pools, sizes = FakeMemory(free=500 * MIB), list[KVPool](), list[int]()

    def make(kv: KVPool) -> dict[ForwardMode, tuple[Runner, ...]]:
        pools.append(kv)
        return cuda_runners(engine, kv)

    def capture(self: CudaGraphRunner, size: int) -> None:
        sizes.append(size)

    monkeypatch.setattr(CudaGraphRunner, "capture", capture)
    monkeypatch.setattr(CudaGraphRunner, "num_bytes", property(lambda _: (0, 90, 100)[len(sizes)]))
    found = run_trial(engine.plan, engine.model, memory, make, captures=True)
    assert [pool.num_pages for pool in pools] == [1]
    assert sizes == [8, 4], "of 8, 4, 2 and 1"
    assert found == Trial(
        step_bytes=7 * MIB, graph_bytes=120, more_graph_bytes=20, free_bytes=500 * MIB
    )
    assert memory.log == ["held", "watch", "watched", "free"]


def test_a_trials_pool_and_graphs_are_gone_with_it(random_llama: Path) -> None:
    engine = build_yardstick(random_llama, pages=60, max_num_seqs=8, max_num_batched_tokens=64)
    made: list[weakref.ref[object]] = []

    def make(kv: KVPool) -> dict[ForwardMode, tuple[Runner, ...]]:
        parts = replace(parts_of(engine, faked_fa3), kv=kv)
        graphs: Runner = CudaGraphRunner(FakedCudaGraph(), parts)
        pieces: Runner = PiecewiseCudaGraphRunner(FakedCudaGraph(), parts)
        eager: Runner = EagerRunner(parts.model, kv, parts.attention)
        made.extend(weakref.ref(each) for each in (kv, graphs, pieces))
        return dict.fromkeys(engine.plan.paths, (graphs, pieces, eager))

    gc.collect()
    gc.disable()  # as a worker does while it starts
    try:
        run_trial(engine.plan, engine.model, FakeMemory(free=0), make, captures=True)
        left = [ref() for ref in made if ref() is not None]
    finally:
        gc.enable()
    assert left == []


def test_where_a_graph_cannot_be_captured_the_estimate_counts(
    random_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_yardstick(random_llama, pages=60, max_num_seqs=8, max_num_batched_tokens=64)
    plan = replace(engine.plan, memory=replace(engine.plan.memory, graph_bytes=1234))

    def refuse(self: CudaGraphRunner, size: int) -> None:
        raise CaptureError("refused")

    monkeypatch.setattr(CudaGraphRunner, "capture", refuse)
    memory = FakeMemory(free=500 * MIB)
    found = run_trial(
        plan, engine.model, memory, lambda kv: cuda_runners(engine, kv), captures=True
    )
    assert found.graph_bytes == found.more_graph_bytes == 1234


# The start.


@pytest.mark.skipif(
    native_variant(load_hardware("this")) is None, reason="plain attention copies from its pool"
)
def test_a_start_gives_the_pool_what_was_measured_and_captures_over_that(
    random_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 32}
    ordinary = build_engine(random_llama, **limits)
    reference = run(ordinary, greedy(6))
    memory = FakeMemory(free=ordinary.plan.memory.reserve_bytes + 40 * MIB)
    monkeypatch.setattr(startup, "device_memory", lambda device: memory)
    engine = build_engine(random_llama, **limits)
    plan = engine.plan
    (event,) = (event.message for event in plan.events if event.stage == "kv_pool")
    assert event.startswith(f"KV pool of {plan.num_pages} pages")
    room = memory.free - 7 * MIB - plan.memory.reserve_bytes
    assert plan.num_pages == room // 2 // (plan.kv_bytes // plan.num_pages)
    assert engine.kv.num_pages == plan.num_pages
    assert plan.measured is not None
    assert plan.measured.activation_bytes == 7 * MIB
    assert plan.measured.activation_origin == "a largest step, eager, with sampling"
    assert plan.measured.peak_bytes == 120 * MIB
    assert not [e for e in plan.events if e.message.startswith("warning")]
    assert_same_answers(run(engine, greedy(6)), reference)


def test_a_start_that_leaves_less_than_the_reserve_says_so(
    random_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = FakeMemory(free=20 * MIB)
    monkeypatch.setattr(startup, "device_memory", lambda device: memory)
    engine = build_engine(random_llama, pages=40, max_num_seqs=4, max_num_batched_tokens=32)
    assert engine.kv.num_pages == 41
    assert engine.plan.events[-1].message.startswith("warning: 13 MiB are left beside")


def test_a_largest_step_that_fails_does_not_end_the_start(
    random_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"pages": 40, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    reference = run(build_engine(random_llama, **limits), greedy(6))

    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore lines")

    memory = FakeMemory(free=500 * MIB)
    monkeypatch.setattr("polypath.runtime.trial.run_largest", fail)
    monkeypatch.setattr(startup, "device_memory", lambda device: memory)
    engine = build_engine(random_llama, **limits)
    (event,) = (event.message for event in engine.plan.events if event.stage == "kv_pool")
    assert event == (
        "warning: a largest step failed (CUDA out of memory. Tried to allocate 9 GiB); "
        "the pool is as planned"
    )
    assert engine.kv.num_pages == 41
    measured = engine.plan.measured
    assert measured is not None and measured.activation_bytes is None
    assert measured.activation_origin == "not measured: a largest step failed"
    assert_same_answers(run(engine, greedy(6)), reference)


def test_what_a_failed_step_held_is_free_when_the_device_is_asked(
    random_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[weakref.ref[KVPool]] = []
    alive: list[bool] = []

    class Memory(FakeMemory):
        def free_bytes(self) -> int:
            alive.append(pools[0]() is not None)
            return 500 * MIB

    def fail(eager: Runner, *args: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("polypath.runtime.trial.run_largest", fail)
    made = KVPool.__init__

    def make(self: KVPool, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        pools.append(weakref.ref(self))

    monkeypatch.setattr(KVPool, "__init__", make)
    monkeypatch.setattr(startup, "device_memory", lambda device: Memory(free=0))
    # pytest keeps what is logged, and with an error its frames.
    monkeypatch.setattr(startup.logger, "warning", lambda *args, **options: None)
    gc.collect()
    gc.disable()  # as a worker does while it starts
    try:
        build_engine(random_llama, pages=40, max_num_seqs=4, max_num_batched_tokens=32)
    finally:
        gc.enable()
    assert alive[0] is False


class FakeTorchCuda:
    """What `CudaMemory` asks of torch.cuda."""

    def __init__(self) -> None:
        self.peak, self.log = 30, list[str]()

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def empty_cache(self) -> None:
        self.log.append("empty_cache")

    def mem_get_info(self) -> tuple[int, int]:
        self.log.append("mem_get_info")
        return 70, 100

    def memory_allocated(self) -> int:
        return 20

    def max_memory_allocated(self) -> int:
        return self.peak

    def reset_peak_memory_stats(self) -> None:
        self.peak = 20


def test_a_cards_free_memory_is_read_after_the_cache_is_given_back() -> None:
    cuda = FakeTorchCuda()
    memory = CudaMemory(cuda)
    assert memory.free_bytes() == 70
    assert cuda.log == ["synchronize", "empty_cache", "mem_get_info"]


def test_watching_a_step_does_not_forget_an_earlier_peak() -> None:
    cuda = FakeTorchCuda()
    memory = CudaMemory(cuda)
    memory.watch()
    assert (memory.watched_bytes(), memory.peak_bytes()) == (20, 30)
    cuda.peak = 45
    assert (memory.watched_bytes(), memory.peak_bytes()) == (45, 45)


def test_a_cpu_has_no_memory_of_its_own() -> None:
    assert startup.device_memory(torch.device("cpu")) is None
