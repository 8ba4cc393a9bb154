"""CUDA graphs over a stand-in for torch.cuda: the order of its calls, and what a replay computes.

tests/gpu has the same on a card.
"""

from __future__ import annotations

import gc
from contextlib import suppress

import pytest
import torch

from polypath.runtime.graphs.cuda import CudaCapturedGraph, CudaGraph
from polypath.runtime.graphs.mechanism import CaptureError, Forward, ReplayError
from polypath.tests.fake_cuda import FakeCuda


def capture(
    graph: CudaGraph, forward: Forward, rows: int, *inputs: torch.Tensor, is_breakable: bool = False
) -> CudaCapturedGraph:
    graph.warm_up(forward, is_breakable=is_breakable)
    graph.begin(rows, inputs, is_breakable=is_breakable)
    try:
        return graph.end(forward())
    except BaseException:
        graph.abandon()
        raise


def test_warms_up_on_the_stream_that_captures_after_all_earlier_work() -> None:
    cuda = FakeCuda()
    x = torch.ones(2)
    cuda.streams.write(x)
    seen: list[int] = []

    def forward() -> tuple[torch.Tensor, ...]:
        seen.append(cuda.current_stream().number)
        assert cuda.current_stream().known.items() >= cuda.streams.default.known.items()
        return (x + 1,)

    graph = capture(CudaGraph(cuda), forward, 2, x)
    assert len(seen) == 2 and len(set(seen)) == 1 and seen[0] != cuda.streams.default.number
    assert cuda.log == ["synchronize", "synchronize", "empty_cache", "begin pool 1 stream 2", "end"]
    assert cuda.current_stream() is cuda.streams.default
    x.fill_(5)
    graph.replay(2, [x])
    assert graph.outputs[0].tolist() == [6, 6]


def test_all_graphs_and_parts_share_one_pool_and_one_stream() -> None:
    cuda = FakeCuda()
    mechanism = CudaGraph(cuda)
    ran: list[int] = []

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, out = x + 1, torch.empty_like(x)
        held, filled = mechanism.weak(y), mechanism.weak(out)

        def between(rows: int) -> None:
            ran.append(rows)
            filled.copy_(held * 10)

        mechanism.break_(between, [y], [out])
        return (out + 1,)

    graphs = {}
    for size in (4, 2):
        x = torch.zeros(size)
        found = capture(mechanism, lambda x=x: forward(x), size, x, is_breakable=True)
        graphs[size] = (x, found)
    begun = [line for line in cuda.log if line.startswith("begin")]
    assert begun == ["begin pool 1 stream 2"] * 4
    assert ran == [0, 0], "in warm-up alone, with no live row"
    x, graph = graphs[4]
    x.copy_(torch.arange(4.0))
    graph.replay(3, [x])
    assert ran[-1] == 3 and graph.num_breaks == 1
    assert graph.outputs[0].tolist() == [11, 21, 31, 41]
    assert (mechanism.num_bytes, graph.num_bytes) == (40, 10), "2 graphs of 10 and 5 bytes each"


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_collected_while_a_graph_is_captured(fails: bool) -> None:
    cuda = FakeCuda()
    seen: list[bool] = []

    def forward() -> tuple[torch.Tensor, ...]:
        if cuda.capturing is not None:
            seen.append(gc.isenabled())
            if fails:
                raise RuntimeError("planted")
        return (torch.empty(2),)

    assert gc.isenabled()
    with suppress(RuntimeError):
        capture(CudaGraph(cuda), forward, 2)
    assert seen == [False] and gc.isenabled()


def test_a_capture_that_may_not_break_says_so() -> None:
    mechanism = CudaGraph(FakeCuda())

    def forward() -> tuple[torch.Tensor, ...]:
        mechanism.break_(lambda rows: None, [], [])
        return ()

    with pytest.raises(CaptureError, match="may not break"):
        capture(mechanism, forward, 1)


@pytest.mark.parametrize("is_broken", [False, True])
def test_after_a_failed_capture_the_next_one_has_a_pool_of_its_own(is_broken: bool) -> None:
    cuda = FakeCuda()
    mechanism = CudaGraph(cuda)
    x = torch.zeros(3)

    def fails_in_capture() -> tuple[torch.Tensor, ...]:
        if cuda.capturing is not None:
            cuda.capturing.is_broken = is_broken
            raise torch.OutOfMemoryError("CUDA out of memory")
        return (x,)

    with pytest.raises(torch.OutOfMemoryError):
        capture(mechanism, fails_in_capture, 3, x)
    assert cuda.current_stream() is cuda.streams.default and cuda.capturing is None
    graph = capture(mechanism, lambda: (x + 1,), 3, x)
    assert cuda.log[-2] == "begin pool 2 stream 3"
    graph.replay(3, [x])
    assert graph.outputs[0].tolist() == [1, 1, 1]


def test_names_what_the_driver_would_refuse() -> None:
    x = torch.ones(3)
    mechanism = CudaGraph(FakeCuda())
    mechanism.begin(3, [x], is_breakable=False)
    with pytest.raises(CaptureError, match="nonzero"):
        x.nonzero()
    with pytest.raises(CaptureError, match="may not wait for the device"):
        torch.cuda.synchronize()
    mechanism.abandon()
    assert x.nonzero().numel() == 3


def test_refuses_inputs_that_have_moved_and_too_many_rows() -> None:
    x = torch.zeros(3)
    graph = capture(CudaGraph(FakeCuda()), lambda: (x + 1,), 3, x)
    with pytest.raises(ReplayError, match="moved"):
        graph.replay(3, [x.clone()])
    with pytest.raises(ReplayError, match="4 rows"):
        graph.replay(4, [x])
