"""On a card: graphs equal eager with everything poisoned in between, each planted fault is seen, a
failed capture leaves the mechanism usable, and memory is shared by sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from polypath.runtime.attention.triton import TritonBackend, TritonCaptured
from polypath.runtime.engine import Engine
from polypath.runtime.forward_mode import ForwardMode
from polypath.runtime.graphs.cuda import CudaGraph, without_owner
from polypath.runtime.graphs.mechanism import CaptureError, ReplayError
from polypath.runtime.runners.cuda_graph import CudaGraphRunner
from polypath.runtime.runners.graph import GraphRunner
from polypath.runtime.runners.piecewise_cuda_graph import PiecewiseCudaGraphRunner
from polypath.tests import tiny_models
from polypath.tests.driving import assert_same_answers, build_engine, greedy, run
from polypath.tests.graph_check import Bench, bench, problems
from polypath.tests.planted_faults import moved_input, padding_into_a_live_page, wrong_bucket

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
OPS = ("torch", "triton")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tiny_models.random(path, hidden=256)
    return path


def parts_on_card(folder: Path, **options: Any) -> Bench:
    values = {"attention_backend": "triton", "ops": "torch"} | options
    return bench(folder, device="cuda", dtype="float32", linear_method="dense", **values)


@pytest.fixture
def parts(folder: Path) -> Bench:
    return parts_on_card(folder)


def captured(found: Bench, mechanism: CudaGraph | None = None) -> CudaGraphRunner:
    runner = CudaGraphRunner(mechanism or CudaGraph(), found.parts)
    for size in runner.wanted:
        runner.capture(size)
    return runner


@pytest.mark.parametrize("ops", OPS)
def test_replays_equal_eager(folder: Path, ops: str) -> None:
    found = parts_on_card(folder, ops=ops)
    assert problems(found, captured(found)) == []


@pytest.mark.parametrize("backend", ["triton", "torch_sdpa"])
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_pieces_equal_eager(folder: Path, backend: str, tokens: int) -> None:
    found = parts_on_card(folder, attention_backend=backend)
    runner = PiecewiseCudaGraphRunner(CudaGraph(), found.parts)
    for size in runner.wanted:
        runner.capture(size)
    assert problems(found, runner, tokens=tokens) == []


def test_smaller_graphs_use_the_memory_of_the_largest(parts: Bench) -> None:
    runner = CudaGraphRunner(CudaGraph(), parts.parts)
    runner.capture(8)
    largest = runner.mechanism.num_bytes
    assert largest > 0
    for size in (4, 2, 1):
        runner.capture(size)
    assert runner.mechanism.num_bytes <= 2 * largest


def test_a_tensor_without_owner_is_the_same_memory() -> None:
    x = torch.arange(12, device="cuda", dtype=torch.bfloat16).view(3, 4)[:, 1:3]
    alias = without_owner(x)
    assert alias.data_ptr() == x.data_ptr() and torch.equal(alias, x)
    x.fill_(7)
    assert (alias == 7).all()


Plant = Callable[[pytest.MonkeyPatch], None]


def stale_length(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TritonCaptured, "refresh", lambda self, batch: None)


def metadata_in_the_graph(patch: pytest.MonkeyPatch) -> None:
    attend = TritonBackend.attend

    def make_lengths_and_attend(self: TritonBackend, *args: Any) -> torch.Tensor:
        torch.tensor([1, 1, 1], device="cuda")
        return attend(self, *args)

    patch.setattr(TritonBackend, "attend", make_lengths_and_attend)


def host_read(patch: pytest.MonkeyPatch) -> None:
    attend = TritonBackend.attend

    def look(self: TritonBackend, q: torch.Tensor, *args: Any) -> torch.Tensor:
        assert q.max().item() is not None
        return attend(self, q, *args)

    patch.setattr(TritonBackend, "attend", look)


def waiting(patch: pytest.MonkeyPatch) -> None:
    attend = TritonBackend.attend

    def wait(self: TritonBackend, *args: Any) -> torch.Tensor:
        torch.cuda.synchronize()
        return attend(self, *args)

    patch.setattr(TritonBackend, "attend", wait)


@pytest.mark.parametrize(
    ("plant", "seen"),
    [
        (stale_length, "differ"),
        (wrong_bucket, "tokens were given to a graph of 1"),
        (padding_into_a_live_page, "padding points into a live page"),
        (moved_input, "an input has moved"),
        (metadata_in_the_graph, "values on the host"),
        (host_read, "item"),
        (waiting, "wait for the device"),
    ],
)
def test_a_planted_fault_is_seen_and_leaves_the_mechanism_usable(
    parts: Bench, monkeypatch: pytest.MonkeyPatch, plant: Plant, seen: str
) -> None:
    mechanism = CudaGraph()
    with monkeypatch.context() as patch:
        plant(patch)
        try:
            found = "; ".join(problems(parts, captured(parts, mechanism)))
        except (CaptureError, ReplayError) as error:
            found = str(error)
    assert seen in found
    assert problems(parts, captured(parts, mechanism)) == []


def test_a_capture_that_the_driver_ends_leaves_the_mechanism_usable(parts: Bench) -> None:
    mechanism = CudaGraph()
    x = torch.ones(4, device="cuda")
    mechanism.begin(4, [x], is_breakable=False)
    with pytest.raises(RuntimeError):
        torch._C._cuda_synchronize()  # past our own guard
    mechanism.abandon()
    assert problems(parts, captured(parts, mechanism)) == []


def engine_of(folder: Path, **options: Any) -> Engine:
    return build_engine(
        folder, pages=80, device="cuda", dtype="float32", max_num_seqs=8,
        max_num_batched_tokens=64, attention_backend="triton", **options,
    )  # fmt: skip


def test_a_whole_engine_gives_the_tokens_of_eager(folder: Path) -> None:
    graphs = engine_of(folder)
    assert graphs.plan.paths[ForwardMode.DECODE].runner == "cuda_graph"
    assert graphs.plan.paths[ForwardMode.PREFILL].runner == "piecewise_cuda_graph"
    reference = run(engine_of(folder, runner="eager"), greedy(8))
    assert_same_answers(run(graphs, greedy(8)), reference)
    steps = graphs.counters.steps
    assert any(key[1:] == ("cuda_graph", "planned") for key in steps)


def test_sizes_that_do_not_fit_memory_are_dropped_and_the_worker_is_ready(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = GraphRunner.capture

    def exhaust(self: GraphRunner, size: int) -> None:
        if size > 2:
            torch.empty(1 << 44, device="cuda")
        capture(self, size)

    monkeypatch.setattr(GraphRunner, "capture", exhaust)
    engine = engine_of(folder)
    assert engine.plan.paths[ForwardMode.DECODE].runner == "cuda_graph"
    assert any("out of memory" in event.message for event in engine.plan.events)
    run(engine, greedy(4))


@pytest.mark.parametrize("backend", ["flashinfer", "vllm_flash_attn"])
def test_a_package_gives_the_tokens_of_the_yardstick(tmp_path: Path, backend: str) -> None:
    """Head dim 64 in bfloat16: logits of the two differ by rounding, so ties may part."""
    module = {"flashinfer": "flashinfer", "vllm_flash_attn": "vllm"}[backend]
    pytest.importorskip(module, reason=f"{module} is not installed")
    shape = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    tiny_models.random(tmp_path, hidden=256, config=shape)
    made = build_engine(
        tmp_path, pages=80, device="cuda", dtype="bfloat16", max_num_seqs=8,
        attention_backend=backend, self_check=True,
    )  # fmt: skip
    assert made.plan.paths[ForwardMode.DECODE].attention_backend == backend
    assert made.plan.paths[ForwardMode.DECODE].runner == "cuda_graph"
    checks = [e.message for e in made.plan.events if e.stage == "self_check"]
    assert any("agrees with" in text for text in checks)
    run(made, greedy(6))
