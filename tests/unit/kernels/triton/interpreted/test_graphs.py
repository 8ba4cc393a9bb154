"""Graphs of whole forward passes over the Triton table and backend: recordings hold their launches
by address, replays equal eager, and each kind of fault is planted once and must be seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from polypath.kernels.triton.paged import PagedRows
from polypath.kernels.triton.silu_mul import silu_mul
from polypath.runtime.attention.triton import TritonBackend, TritonCaptured
from polypath.runtime.graphs.mechanism import CaptureError, GraphMechanism, ReplayError
from polypath.runtime.graphs.recording import RecordedGraph, Recording
from polypath.runtime.models.decoder import Decoder
from polypath.runtime.ops.triton import TritonOps
from polypath.runtime.runners.cuda_graph import CudaGraphRunner
from polypath.runtime.runners.graph import GraphRunner
from polypath.runtime.runners.piecewise_cuda_graph import PiecewiseCudaGraphRunner
from polypath.runtime.runners.static_batch import StaticBatch
from polypath.tests import tiny_models
from polypath.tests.driving import build_yardstick
from polypath.tests.graph_check import Bench, problems
from polypath.tests.graph_engine import FakedCudaGraph, parts_of
from polypath.tests.planted_faults import moved_input, padding_into_a_live_page, wrong_bucket

CHECKED = {"row_counts": (3, 1), "longest": 17}  # few and short: every program is interpreted


def bench_of(folder: Path, layers: int) -> Bench:
    tiny_models.random(folder, layers=layers, hidden=64)
    engine = build_yardstick(folder, pages=80, max_num_seqs=8, max_num_batched_tokens=64)
    parts = parts_of(engine, lambda context: TritonBackend(context.model))
    model = Decoder(engine.model.config, engine.model.weights, TritonOps())
    return Bench(engine, replace(parts, model=model, capture_sizes=(1, 4)), None)


@pytest.fixture
def parts(tmp_path: Path) -> Bench:
    return bench_of(tmp_path, layers=1)


def captured(found: Bench, made: Callable[[], GraphMechanism] = Recording) -> CudaGraphRunner:
    runner = CudaGraphRunner(made(), found.parts)
    for size in runner.wanted:
        runner.capture(size)
    return runner


def graph_of(runner: CudaGraphRunner, size: int) -> RecordedGraph:
    graph = runner._buckets[size].graph
    assert isinstance(graph, RecordedGraph)
    return graph


def test_a_capture_notes_every_launch_with_its_tensors(tmp_path: Path) -> None:
    found = bench_of(tmp_path, layers=2)
    runner = captured(found)
    launches = graph_of(runner, 4).launches
    assert Counter(launch.name for launch in launches) == {
        "_rms_norm": 1,
        "_add_rms_norm": 4,  # two a layer; the last is the final norm
        "_rope_store": 2,
        "_attend_splits": 2,
        "_merge_splits": 2,
        "_silu_mul": 2,
        "_largest_of_part": 1,
        "_largest_of_row": 1,
    }
    stores = [launch for launch in launches if launch.name == "_rope_store"]
    slots = runner._buckets[4].static.token_inputs()[2]
    for layer, launch in zip(found.parts.kv.layers, stores, strict=True):
        addresses = {tensor.data_ptr() for tensor in launch.tensors}
        assert {layer.data_ptr(), slots.data_ptr()} <= addresses


@pytest.mark.parametrize("made", [Recording, pytest.param(FakedCudaGraph, marks=pytest.mark.slow)])
def test_replays_equal_eager(parts: Bench, made: Callable[[], GraphMechanism]) -> None:
    assert problems(parts, captured(parts, made), **CHECKED) == []


@pytest.mark.slow
@pytest.mark.parametrize("made", [Recording, FakedCudaGraph])
@pytest.mark.parametrize("tokens", [1, 3])
def test_pieces_equal_eager(parts: Bench, made: Callable[[], GraphMechanism], tokens: int) -> None:
    runner = PiecewiseCudaGraphRunner(made(), parts.parts)
    for size in (12, 8):
        runner.capture(size)
    assert problems(parts, runner, tokens, **CHECKED) == []


def test_a_launch_in_a_capture_computes_nothing_and_afterwards_it_does() -> None:
    gate_up, out = torch.randn(2, 16), torch.zeros(2, 8)
    recording = Recording()
    with torch.inference_mode():
        recording.begin(2, [gate_up], is_breakable=False)
        noted = silu_mul(gate_up)
        graph = recording.end([noted])
        assert not noted.any()
        recording.poison()
        graph.replay(2, [gate_up])
        out = silu_mul(gate_up)
    assert torch.equal(noted, out) and out.any()


# Planted faults.

Plant = Callable[[pytest.MonkeyPatch], None]


def stale_length(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TritonCaptured, "refresh", lambda self, batch: None)


def metadata_in_the_graph(patch: pytest.MonkeyPatch) -> None:
    attend = TritonBackend.attend
    static = StaticBatch(tokens=4, rows=4, max_pages=1, page_size=16, device=torch.device("cpu"))
    largest = static.batch(GraphRunner.mode)

    def plan_and_attend(self: TritonBackend, *args: Any) -> torch.Tensor:
        self.plan(largest)
        return attend(self, *args)

    patch.setattr(TritonBackend, "attend", plan_and_attend)


def freed_tensor(patch: pytest.MonkeyPatch) -> None:
    def use_copies(self: TritonCaptured) -> None:  # which the next eager step lets go
        rows = self._rows
        copies = PagedRows(rows.page_table, rows.query_starts.clone(), rows.kv_lens.clone())
        self._backend.read_from(copies, self._query_starts)

    patch.setattr(TritonCaptured, "use", use_copies)


def host_read(patch: pytest.MonkeyPatch) -> None:
    attend = TritonBackend.attend

    def look(self: TritonBackend, q: torch.Tensor, *args: Any) -> torch.Tensor:
        assert q.max().item() is not None
        return attend(self, q, *args)

    patch.setattr(TritonBackend, "attend", look)


@pytest.mark.parametrize(
    ("plant", "seen"),
    [
        pytest.param(stale_length, "logits differ", marks=pytest.mark.slow),
        pytest.param(wrong_bucket, "tokens were given to a graph of 1", marks=pytest.mark.slow),
        pytest.param(
            padding_into_a_live_page, "padding points into a live page", marks=pytest.mark.slow
        ),
        pytest.param(moved_input, "an input has moved", marks=pytest.mark.slow),
        (metadata_in_the_graph, "refresh it outside the graph"),
        pytest.param(
            freed_tensor, "was freed since the graph was captured", marks=pytest.mark.slow
        ),
        (host_read, "item"),
    ],
)
def test_a_planted_fault_is_seen(
    parts: Bench, monkeypatch: pytest.MonkeyPatch, plant: Plant, seen: str
) -> None:
    plant(monkeypatch)
    try:
        found = "; ".join(problems(parts, captured(parts), **CHECKED))
    except (CaptureError, ReplayError) as error:
        found = str(error)
    assert seen in found
