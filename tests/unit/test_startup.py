"""Start-up: what the self-check refuses is taken out, said, and replaced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from polypath.runtime import self_check, startup
from polypath.runtime.config import EngineConfig
from polypath.runtime.engine import Engine
from polypath.runtime.errors import EngineError
from polypath.runtime.forward_mode import ForwardMode
from polypath.runtime.graphs.cpu import CpuGraph
from polypath.runtime.graphs.mechanism import CaptureError
from polypath.runtime.planning.hardware import load_hardware
from polypath.runtime.planning.rules import native_variant
from polypath.runtime.request import SamplingParams
from polypath.runtime.runners.graph import GraphRunner
from polypath.tests.driving import YARDSTICK, build_yardstick

PLAIN = "eager+torch_sdpa+torch"
needs_native = pytest.mark.skipif(
    native_variant(load_hardware("this")) is None, reason="no build of the kernels fits this CPU"
)


@pytest.fixture
def broken_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native attention answers with noise."""
    from polypath.runtime.attention.cpu_native import CpuNativeBackend

    def attend(self: object, q: torch.Tensor, kv: torch.Tensor, layer: int) -> torch.Tensor:
        return torch.randn_like(q)

    monkeypatch.setattr(CpuNativeBackend, "attend", attend)


@needs_native
def test_a_path_that_fails_the_self_check_is_replaced_by_the_plain_one(
    random_llama: Path, broken_native: None
) -> None:
    stages: list[str] = []
    config = EngineConfig(model=str(random_llama), kv_bytes=4 << 20)
    engine = Engine.build(config, on_progress=lambda event: stages.append(event.stage))
    assert {engine.plan.path_name(mode) for mode in engine.plan.paths} == {PLAIN}
    assert engine.plan.linear_method == "dense"
    events = [event.message for event in engine.plan.events]
    assert "cpu_graph: no graph of 32" in events[0] and "randn" in events[0]
    taken_out = [text for text in events if text.endswith("was taken out")]
    assert len(taken_out) == 2, "with its graphs, then without them"
    assert all("cpu_native" in text for text in taken_out)
    assert any("agrees with a plain forward" in text for text in events)
    assert engine.plan.origins["ops"] == "hardware", "nobody asked for it"
    assert stages.count("plan") == 3
    prompt = [5, 6, 7]
    greedy = SamplingParams(temperature=0, max_tokens=8)
    (answer,) = engine.generate([prompt], greedy)
    (expected,) = build_yardstick(random_llama, pages=8).generate([prompt], greedy)
    assert answer.token_ids == expected.token_ids


@needs_native
def test_a_named_path_that_fails_is_an_error(random_llama: Path, broken_native: None) -> None:
    config = EngineConfig(model=str(random_llama), kv_bytes=4 << 20, attention_backend="cpu_native")
    with pytest.raises(EngineError, match="differs from a plain forward"):
        Engine.build(config)


def test_when_the_plain_path_fails_the_worker_does_not_start(
    random_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check, "BOUNDS", {"float32": -1.0})
    config = EngineConfig(model=str(random_llama), kv_bytes=4 << 20, **YARDSTICK)
    with pytest.raises(EngineError, match="no other path is left on this node"):
        startup.start(config)


# The ladder.


def small_engine(folder: Path) -> Engine:
    return Engine.build(EngineConfig(model=str(folder), kv_bytes=4 << 20, max_num_seqs=8))


def answers_as_the_eager_engine(engine: Engine, folder: Path) -> bool:
    prompts = [[5, 6, 7], [8, 9], [10]]
    greedy = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (4, 6, 8)]
    eager = Engine.build(EngineConfig(model=str(folder), kv_bytes=4 << 20, runner="eager"))
    found, expected = engine.generate(prompts, greedy), eager.generate(prompts, greedy)
    return [a.token_ids for a in found] == [a.token_ids for a in expected]


@needs_native
def test_graphs_are_captured_and_said(random_llama: Path) -> None:
    engine = small_engine(random_llama)
    assert engine.plan.path_name(ForwardMode.DECODE) == "cpu_graph+cpu_native+cpu_native"
    events = [event.message for event in engine.plan.events if event.stage == "graphs"]
    assert len(events) == 2 and events[0].startswith("cpu_graph: captured 8 rows")
    assert answers_as_the_eager_engine(engine, random_llama)
    steps = engine.counters.steps
    assert all(runner != "eager" and reason == "planned" for _, runner, reason in steps)


@needs_native
def test_a_size_that_cannot_be_captured_is_dropped(
    random_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = CpuGraph.begin

    def refuse_large(self: CpuGraph, rows: int, inputs: object, *, is_breakable: bool) -> None:
        if rows in (8, 4):
            raise RuntimeError("out of memory: planted\nwith a second line")
        begin(self, rows, inputs, is_breakable=is_breakable)  # type: ignore[arg-type]

    monkeypatch.setattr(CpuGraph, "begin", refuse_large)
    engine = small_engine(random_llama)
    (first, second, *_) = [event.message for event in engine.plan.events]
    assert first == "cpu_graph: no graph of 8, 4 rows: out of memory: planted"
    assert second.startswith("cpu_graph: captured 2 rows")
    assert engine.plan.path_name(ForwardMode.DECODE).startswith("cpu_graph")
    assert answers_as_the_eager_engine(engine, random_llama)
    reasons = {reason for mode, _, reason in engine.counters.steps if mode == "decode"}
    assert reasons == {"planned", "bucket_dropped"}


@needs_native
def test_a_decode_graph_that_cannot_be_captured_leaves_the_piecewise_one(
    random_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: object, size: int) -> None:
        raise CaptureError("planted: a host read")

    monkeypatch.setattr(GraphRunner, "capture", refuse)
    engine = small_engine(random_llama)
    assert engine.plan.path_name(ForwardMode.DECODE).startswith("piecewise_cpu_graph")
    events = [event.message for event in engine.plan.events]
    assert "decode steps run on piecewise_cpu_graph instead of cpu_graph" in events
    assert answers_as_the_eager_engine(engine, random_llama)


@needs_native
def test_without_memory_for_any_graph_the_worker_is_ready_on_eager(
    random_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(num_bytes: int) -> torch.Tensor:
        raise MemoryError("planted: no memory")

    monkeypatch.setattr("polypath.runtime.graphs.cpu.large_zeros", no_memory)
    engine = small_engine(random_llama)
    names = {engine.plan.path_name(mode) for mode in engine.plan.paths}
    assert names == {"eager+cpu_native+cpu_native"}
    assert answers_as_the_eager_engine(engine, random_llama)
    described = json.dumps(engine.plan.to_json())
    assert "planted: no memory" in described and "run on eager instead of" in described
