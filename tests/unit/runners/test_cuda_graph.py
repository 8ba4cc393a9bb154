"""The GPU's graph runners on a CPU: `CudaGraph` over the stand-in for torch.cuda, and recordings
with its rules. Each kind of fault is planted once and must be seen; what fails at start ends one
rung lower.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from polypath.runtime.attention.flash_packages import VllmPackage
from polypath.runtime.attention.vllm_flash_attn import (
    Lengths,
    VllmFlashAttnBackend,
    VllmFlashAttnCaptured,
)
from polypath.runtime.build_context import BuildContext
from polypath.runtime.forward_mode import ForwardMode
from polypath.runtime.graphs.mechanism import CaptureError, GraphMechanism, ReplayError
from polypath.runtime.graphs.recording import Recording
from polypath.runtime.graphs.streams import Streams
from polypath.runtime.planning.capture_sizes import token_sizes
from polypath.runtime.runners.cuda_graph import CudaGraphRunner
from polypath.runtime.runners.graph import GraphRunner
from polypath.runtime.runners.piecewise_cuda_graph import PiecewiseCudaGraphRunner
from polypath.runtime.runners.runner import Reason
from polypath.runtime.runners.static_batch import StaticBatch
from polypath.tests.driving import build_yardstick, greedy, run
from polypath.tests.fake_flash_attn import Vllm
from polypath.tests.graph_check import Bench, problems
from polypath.tests.graph_engine import FakedCudaGraph, graph_engine, parts_of
from polypath.tests.graph_parity import sdpa
from polypath.tests.planted_faults import moved_input, padding_into_a_live_page, wrong_bucket

MECHANISMS = (FakedCudaGraph, Recording)
DECODE = ForwardMode.DECODE
SMALL = {"pages": 60, "max_num_seqs": 8, "max_num_batched_tokens": 64}


def fa3(context: BuildContext) -> VllmFlashAttnBackend:
    package = VllmPackage(Vllm(2, 3), 3)
    return VllmFlashAttnBackend(context.model, context.dtype, context.device, package)


@pytest.fixture
def parts(random_llama: Path) -> Bench:
    engine = build_yardstick(random_llama, **SMALL | {"pages": 80})
    return Bench(engine, parts_of(engine, fa3), None)


def captured(made: Callable[[], GraphMechanism], found: Bench) -> CudaGraphRunner:
    runner = CudaGraphRunner(made(), found.parts)
    for size in runner.wanted:
        runner.capture(size)
    return runner


@pytest.mark.parametrize("made", MECHANISMS)
def test_replays_equal_eager(parts: Bench, made: Callable[[], GraphMechanism]) -> None:
    assert problems(parts, captured(made, parts)) == []


@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_pieces_equal_eager(parts: Bench, tokens: int) -> None:
    runner = PiecewiseCudaGraphRunner(FakedCudaGraph(), parts.parts)
    for size in runner.wanted:
        runner.capture(size)
    assert problems(parts, runner, tokens=tokens) == []


def test_padding_of_pieces_leaves_no_nan_for_attention_that_reads_the_scratch_page(
    random_llama: Path,
) -> None:
    engine = build_yardstick(random_llama, **SMALL | {"pages": 80})
    found = Bench(engine, parts_of(engine, sdpa), None)
    runner = PiecewiseCudaGraphRunner(FakedCudaGraph(), found.parts)
    for size in runner.wanted:
        runner.capture(size)
    assert problems(found, runner, tokens=1) == []
    assert problems(found, runner, tokens=3) == []


def test_sizes_grow_by_half_at_most_and_end_at_what_a_step_may_have() -> None:
    assert token_sizes(64) == (8, 12, 16, 24, 32, 48, 64)
    assert token_sizes(50) == (8, 12, 16, 24, 32, 48, 50)
    assert token_sizes(8192)[-1] == 2048
    assert token_sizes(5) == (5,)


# Planted faults.

Plant = Callable[[pytest.MonkeyPatch], None]


def stale_length(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(VllmFlashAttnCaptured, "refresh", lambda self, batch: None)


def metadata_in_the_graph(patch: pytest.MonkeyPatch) -> None:
    attend = VllmFlashAttnBackend.attend

    def make_lengths_and_attend(self: VllmFlashAttnBackend, *args: Any) -> torch.Tensor:
        torch.tensor([1, 1, 1])
        return attend(self, *args)

    patch.setattr(VllmFlashAttnBackend, "attend", make_lengths_and_attend)


def host_read(patch: pytest.MonkeyPatch) -> None:
    attend = VllmFlashAttnBackend.attend

    def look(self: VllmFlashAttnBackend, q: torch.Tensor, *args: Any) -> torch.Tensor:
        assert q.max().item() is not None
        return attend(self, q, *args)

    patch.setattr(VllmFlashAttnBackend, "attend", look)


def freed_tensor(patch: pytest.MonkeyPatch) -> None:
    write = Lengths.write_keys

    def elsewhere(self: Lengths, kv_lens: Any) -> None:
        self._kv_lens = torch.zeros_like(self._kv_lens)  # the graph still has the old address
        write(self, kv_lens)

    patch.setattr(Lengths, "write_keys", elsewhere)


@pytest.mark.parametrize(
    ("made", "plant", "seen"),
    [
        (FakedCudaGraph, stale_length, "logits differ"),
        (Recording, wrong_bucket, "tokens were given to a graph of 1"),
        (FakedCudaGraph, padding_into_a_live_page, "padding points into a live page"),
        (FakedCudaGraph, moved_input, "an input has moved"),
        (FakedCudaGraph, metadata_in_the_graph, "refresh it outside the graph"),
        (FakedCudaGraph, freed_tensor, "an input has moved"),
        (FakedCudaGraph, host_read, "item"),
        (Recording, host_read, "item"),
    ],
)
def test_a_planted_fault_is_seen(
    parts: Bench,
    monkeypatch: pytest.MonkeyPatch,
    made: Callable[[], GraphMechanism],
    plant: Plant,
    seen: str,
) -> None:
    with monkeypatch.context() as patch:
        if plant is freed_tensor:
            runner = captured(made, parts)
            plant(patch)
        else:
            plant(patch)
            runner = None
        try:
            found = "; ".join(problems(parts, runner or captured(made, parts)))
        except (CaptureError, ReplayError) as error:
            found = str(error)
    assert seen in found


def test_a_copy_of_inputs_on_another_stream_is_caught(
    parts: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = Streams()
    runner = captured(lambda: Recording(streams=streams), parts)
    copier = streams.new_stream()
    fill = StaticBatch.fill

    def on_its_own_stream(self: StaticBatch, batch: Any) -> None:
        with streams.on(copier):
            fill(self, batch)

    def and_waited_for(self: StaticBatch, batch: Any) -> None:
        copier.wait_stream(streams.current)
        on_its_own_stream(self, batch)
        streams.current.wait_stream(copier)

    with streams.watching():
        monkeypatch.setattr(StaticBatch, "fill", and_waited_for)
        assert problems(parts, runner) == []
        monkeypatch.setattr(StaticBatch, "fill", on_its_own_stream)
        with pytest.raises(ReplayError, match=r"written on stream 2|may still run"):
            problems(parts, runner)


# The ladder.


def fail_above(patch: pytest.MonkeyPatch, most: int, error: Exception) -> None:
    capture = GraphRunner.capture

    def refuse(self: GraphRunner, size: int) -> None:
        if size > most:
            raise error
        capture(self, size)

    patch.setattr(GraphRunner, "capture", refuse)


def test_sizes_that_do_not_fit_memory_are_dropped_and_named(
    random_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_above(monkeypatch, 4, torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB"))
    engine, rung = graph_engine(random_llama, fa3, FakedCudaGraph, **SMALL)
    assert rung.plan.paths[DECODE].runner == "cuda_graph"
    messages = [event.message for event in rung.plan.events]
    assert any("no graph of 8 rows: CUDA out of memory" in text for text in messages)
    run(engine, greedy(8))
    steps = engine.counters.steps
    assert any(mode == DECODE and why == Reason.BUCKET_DROPPED for mode, _, why in steps)


@pytest.mark.parametrize("error", [CaptureError("refused"), torch.OutOfMemoryError("out")])
def test_without_any_whole_graph_decode_steps_run_in_pieces(
    random_llama: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    fail_above(monkeypatch, 0, error)
    engine, rung = graph_engine(random_llama, fa3, Recording, **SMALL)
    assert rung.plan.paths[DECODE].runner == "piecewise_cuda_graph"
    message = "decode steps run on piecewise_cuda_graph instead of cuda_graph"
    assert message in [event.message for event in rung.plan.events]
    run(engine, greedy(8))
    runners = {runner for mode, runner, _ in engine.counters.steps if mode == DECODE}
    assert "piecewise_cuda_graph" in runners
