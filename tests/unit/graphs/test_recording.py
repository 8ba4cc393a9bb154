"""The recording mechanism keeps the rules of a GPU's graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from polypath.runtime.graphs.mechanism import CaptureError, ReplayError
from polypath.runtime.graphs.recording import RecordedGraph, Recording
from polypath.runtime.graphs.streams import Streams

MASK = torch.tensor([True, False])


@pytest.mark.parametrize(
    ("operation", "named"),
    [
        (lambda x: x[0, 0].item(), "item"),
        (lambda x: x.cpu(), "cpu"),
        (lambda x: bool(x[0, 0] > 0), "__bool__"),
        (lambda x: x.pin_memory(), "pinned memory"),
        (lambda x: torch.empty(3, pin_memory=True), "pinned memory"),
        (lambda x: torch.cuda.synchronize(), "torch.cuda.synchronize|cuda.synchronize"),
        (lambda x: x.nonzero(), "shape of its result depends on values"),
        (lambda x: x.masked_select(x > 0), "shape of its result depends on values"),
        (lambda x: x[MASK], "depends on a mask"),
        (lambda x: x.index_put_((MASK,), x[0]), "depends on a mask"),
        (lambda x: torch.equal(x, x), "value on the host"),
        (lambda x: torch.tensor([1.0]), "values on the host"),
        (lambda x: x.unique(), "depends on values"),
    ],
)
def test_what_no_gpu_captures_is_named(
    operation: Callable[[torch.Tensor], object], named: str
) -> None:
    x = torch.randn(2, 8)
    recording = Recording()
    recording.begin(2, [x], is_breakable=True)
    try:
        with torch.inference_mode(), pytest.raises(CaptureError, match=named):
            operation(x)
    finally:
        recording.abandon()


def test_after_a_capture_everything_is_allowed_again() -> None:
    recording = Recording()
    recording.begin(1, [], is_breakable=False)
    recording.end([])
    assert torch.ones(2)[MASK].item() == 1
    assert "refuse" not in torch.cuda.synchronize.__qualname__


def test_indexing_by_numbers_and_results_of_several_tensors_are_captured() -> None:
    x, rows = torch.randn(4, 3), torch.tensor([2, 0])
    recording = Recording()
    recording.begin(4, [x, rows], is_breakable=False)
    values, where = x[rows].topk(2)
    graph = recording.end([values, where])
    x.copy_(torch.randn(4, 3))
    rows.copy_(torch.tensor([3, 1]))
    recording.poison()
    graph.replay(4, [x, rows])
    expected = x[rows].topk(2)
    assert torch.equal(values, expected[0]) and torch.equal(where, expected[1])


# Stream order.


@pytest.fixture
def streams() -> Streams:
    return Streams()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.zeros(3)


@pytest.fixture
def graph(streams: Streams, x: torch.Tensor) -> RecordedGraph:
    recording = Recording(streams=streams)
    recording.begin(3, [x], is_breakable=False)
    return recording.end([x + 1])


def test_a_copy_on_the_stream_of_the_replay_is_in_order(
    streams: Streams, x: torch.Tensor, graph: RecordedGraph
) -> None:
    with streams.watching():
        x.copy_(torch.ones(3))
        graph.replay(3, [x])
        x.copy_(torch.zeros(3))
        graph.replay(3, [x])


def test_a_copy_on_another_stream_without_an_event_is_caught(
    streams: Streams, x: torch.Tensor, graph: RecordedGraph
) -> None:
    with streams.watching(), streams.on(streams.new_stream()):
        x.copy_(torch.ones(3))
    with pytest.raises(ReplayError, match="input 0 is written on stream 2, and stream 1"):
        graph.replay(3, [x])


@pytest.mark.parametrize("by", ["event", "stream", "host"])
def test_a_copy_on_another_stream_that_is_waited_for_is_in_order(
    streams: Streams, x: torch.Tensor, graph: RecordedGraph, by: str
) -> None:
    other = streams.new_stream()
    with streams.watching(), streams.on(other):
        x.copy_(torch.ones(3))
        copied = streams.new_event()
        copied.record()
    if by == "event":
        streams.current.wait_event(copied)
    elif by == "stream":
        streams.current.wait_stream(other)
    else:
        other.synchronize()
    graph.replay(3, [x])


def test_an_event_recorded_before_the_copy_orders_nothing(
    streams: Streams, x: torch.Tensor, graph: RecordedGraph
) -> None:
    other, early = streams.new_stream(), streams.new_event()
    early.record(other)
    with streams.watching(), streams.on(other):
        x.copy_(torch.ones(3))
    streams.current.wait_event(early)
    with pytest.raises(ReplayError, match="does not wait"):
        graph.replay(3, [x])


def test_the_next_input_may_not_be_written_while_the_graph_may_still_read(
    streams: Streams, x: torch.Tensor, graph: RecordedGraph
) -> None:
    graph.replay(3, [x])
    other = streams.new_stream()
    with streams.watching(), streams.on(other):
        with pytest.raises(ReplayError, match="may still run on stream 1"):
            x.copy_(torch.ones(3))
        other.wait_stream(streams.default)
        x.copy_(torch.ones(3))
