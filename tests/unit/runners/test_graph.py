"""The generic graph runner on CPU graphs and on the recording mechanism, against eager on the same
kernels; each kind of fault is planted once and must be seen.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from polypath.runtime.attention.cpu_native import CpuNativeBackend, CpuNativeCaptured
from polypath.runtime.forward_batch import ForwardBatch
from polypath.runtime.graphs.cpu import CpuGraph
from polypath.runtime.graphs.mechanism import CaptureError, GraphMechanism, ReplayError
from polypath.runtime.graphs.recording import Recording
from polypath.runtime.ops.cpu_native import CpuNativeOps
from polypath.runtime.planning.hardware import load_hardware
from polypath.runtime.planning.rules import native_variant
from polypath.runtime.runners.graph import GraphRunner
from polypath.runtime.runners.piecewise import PiecewiseRunner
from polypath.runtime.runners.runner import Reason
from polypath.runtime.runners.static_batch import StaticBatch
from polypath.tests.graph_check import Bench, bench, problems

pytestmark = pytest.mark.skipif(
    native_variant(load_hardware("this")) is None, reason="no build of the kernels fits this CPU"
)
MECHANISMS = ("cpu_graph", "recording")


@pytest.fixture
def parts(random_llama: Path) -> Bench:
    return bench(random_llama)


def mechanism(name: str, found: Bench) -> GraphMechanism:
    assert found.library is not None
    return CpuGraph(found.library) if name == "cpu_graph" else Recording(found.library)


def captured(name: str, found: Bench) -> GraphRunner:
    runner = GraphRunner(name, mechanism(name, found), found.parts)
    for size in runner.wanted:
        runner.capture(size)
    return runner


def decode_batch(found: Bench, rows: int) -> ForwardBatch:
    static = StaticBatch(
        tokens=rows, rows=rows, max_pages=1, page_size=16, device=torch.device("cpu")
    )
    return static.batch(GraphRunner.mode)


@pytest.mark.parametrize("name", MECHANISMS)
def test_replays_equal_eager_bit_for_bit(parts: Bench, name: str) -> None:
    assert problems(parts, captured(name, parts)) == []


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_piecewise_replays_equal_eager_bit_for_bit(parts: Bench, name: str, tokens: int) -> None:
    runner = PiecewiseRunner(name, mechanism(name, parts), parts.parts, [8, 16, 32, 64])
    for size in runner.wanted:
        runner.capture(size)
    assert problems(parts, runner, tokens=tokens) == []


def test_piecewise_recording_of_the_plain_path_equals_eager(random_llama: Path) -> None:
    found = bench(random_llama, attention_backend="torch_sdpa", ops="torch", linear_method="dense")
    runner = PiecewiseRunner("recording", Recording(), found.parts, [64, 32, 16, 8])
    for size in runner.wanted:
        runner.capture(size)
    assert problems(found, runner, tokens=8) == []


def test_one_cpu_graph_serves_every_size_and_computes_live_rows_only(parts: Bench) -> None:
    runner = GraphRunner("cpu_graph", mechanism("cpu_graph", parts), parts.parts)
    runner.capture(8)
    assert all(runner.covers(size) for size in runner.wanted)
    assert problems(parts, runner) == []


# Reasons.


def test_reasons_say_why_a_batch_runs_elsewhere(parts: Bench) -> None:
    runner = captured("recording", parts)
    assert runner.why_not(decode_batch(parts, 8)) is None
    assert runner.why_not(decode_batch(parts, 9)) is Reason.ABOVE_LARGEST_BUCKET
    few = GraphRunner("recording", mechanism("recording", parts), parts.parts)
    few.capture(8)
    assert few.why_not(decode_batch(parts, 4)) is None
    assert few.why_not(decode_batch(parts, 3)) is Reason.PADDED_TOO_MUCH
    few = GraphRunner("recording", mechanism("recording", parts), parts.parts)
    few.capture(4)
    assert few.why_not(decode_batch(parts, 5)) is Reason.BUCKET_DROPPED
    none = GraphRunner("recording", mechanism("recording", parts), parts.parts)
    assert none.why_not(decode_batch(parts, 1)) is Reason.BUCKET_DROPPED


# Planted faults.

Plant = Callable[[pytest.MonkeyPatch, Bench], None]


def stale_length(patch: pytest.MonkeyPatch, found: Bench) -> None:
    patch.setattr(CpuNativeCaptured, "refresh", lambda self, batch: None)


def wrong_bucket(patch: pytest.MonkeyPatch, found: Bench) -> None:
    patch.setattr(GraphRunner, "_size_for", lambda self, rows: 1)


def padding_into_a_live_page(patch: pytest.MonkeyPatch, found: Bench) -> None:
    fill = StaticBatch.fill_tokens

    def fill_badly(self: StaticBatch, batch: ForwardBatch) -> None:
        fill(self, batch)
        self._slots[batch.num_tokens :] = batch.slots[0]

    patch.setattr(StaticBatch, "fill_tokens", fill_badly)


def moved_input(patch: pytest.MonkeyPatch, found: Bench) -> None:
    fill = StaticBatch.fill_tokens

    def move(self: StaticBatch, batch: ForwardBatch) -> None:
        fill(self, batch)
        self._positions = self._positions.clone()

    patch.setattr(StaticBatch, "fill_tokens", move)


def metadata_in_the_graph(patch: pytest.MonkeyPatch, found: Bench) -> None:
    attend = CpuNativeBackend.attend

    def refresh_and_attend(self: CpuNativeBackend, *args: torch.Tensor) -> torch.Tensor:
        self._kv_lens = torch.tensor([1] * self._kv_lens.numel(), dtype=torch.int32)
        return attend(self, *args)  # type: ignore[arg-type]

    patch.setattr(CpuNativeBackend, "attend", refresh_and_attend)


def freed_tensor(patch: pytest.MonkeyPatch, found: Bench) -> None:
    norm, library = CpuNativeOps.norm, found.library
    assert library is not None
    address = torch.ones(found.engine.model.config.hidden_size).data_ptr()  # gone at once

    def norm_by_number(
        self: CpuNativeOps, x: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        out = torch.empty_like(x)
        library.functions(x.shape[0])["pp_rms_norm"](
            x.data_ptr(), address, eps, *x.shape, out.data_ptr()
        )
        return out

    assert norm is not None
    patch.setattr(CpuNativeOps, "norm", norm_by_number)


def host_read(patch: pytest.MonkeyPatch, found: Bench) -> None:
    attend = CpuNativeBackend.attend

    def look(self: CpuNativeBackend, *args: torch.Tensor) -> torch.Tensor:
        assert self._kv_lens.tolist()
        return attend(self, *args)  # type: ignore[arg-type]

    patch.setattr(CpuNativeBackend, "attend", look)


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize(
    ("plant", "seen"),
    [
        (stale_length, "logits differ"),
        (wrong_bucket, "tokens were given to a graph of 1"),
        (padding_into_a_live_page, "padding points into a live page"),
        (moved_input, "an input has moved"),
        (metadata_in_the_graph, "refresh it outside the graph"),
        (freed_tensor, "could be freed before a replay"),
        (host_read, "tolist"),
    ],
)
def test_a_planted_fault_is_seen(
    parts: Bench, monkeypatch: pytest.MonkeyPatch, name: str, plant: Plant, seen: str
) -> None:
    plant(monkeypatch, parts)
    try:
        found = "; ".join(problems(parts, captured(name, parts)))
    except (CaptureError, ReplayError) as error:
        found = str(error)
    assert seen in found


def test_live_padding_damages_keys_where_padding_is_computed(
    parts: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    padding_into_a_live_page(monkeypatch, parts)
    found = "; ".join(problems(parts, captured("recording", parts)))
    assert "keys and values differ" in found


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_failed_capture_leaves_the_mechanism_usable(
    parts: Bench, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    runner = GraphRunner(name, mechanism(name, parts), parts.parts)
    with monkeypatch.context() as patch:
        host_read(patch, parts)
        with pytest.raises(CaptureError):
            runner.capture(8)
    for size in runner.wanted:
        runner.capture(size)
    assert problems(parts, runner) == []
