"""CPU graphs: what may be captured, what becomes a break, where tensors lie."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polypath.kernels.cpu import ops
from polypath.kernels.cpu.library import Library, load
from polypath.runtime.graphs.arena import Span, lay_out
from polypath.runtime.graphs.cpu import CpuCapturedGraph, CpuGraph
from polypath.runtime.graphs.mechanism import CaptureError, Forward
from polypath.runtime.planning.hardware import load_hardware
from polypath.runtime.planning.rules import native_variant

VARIANT = native_variant(load_hardware("this"))
pytestmark = pytest.mark.skipif(VARIANT is None, reason="no build of the kernels fits this CPU")
EPS = 1e-5


@pytest.fixture(scope="module")
def library() -> Library:
    assert VARIANT is not None
    return load(VARIANT)


def capture(
    graph: CpuGraph, forward: Forward, rows: int, *inputs: torch.Tensor, is_breakable: bool = False
) -> CpuCapturedGraph:
    graph.warm_up(forward, is_breakable=is_breakable)
    graph.begin(rows, inputs, is_breakable=is_breakable)
    try:
        return graph.end(forward())
    finally:
        graph.abandon()


def test_tensors_that_never_live_together_share_bytes(library: Library) -> None:
    x, weight = torch.randn(4, 64), torch.randn(64)

    def forward() -> tuple[torch.Tensor, ...]:
        y = x
        for _ in range(10):
            y = ops.rms_norm(library, y, weight, EPS)
        return (y,)

    mechanism = CpuGraph(library)
    graph = capture(mechanism, forward, 4, x)
    assert mechanism.num_bytes == 2 * 4 * 64 * 4
    mechanism.poison()
    graph.replay(4, [x])
    assert torch.equal(graph.outputs[0], forward()[0])


@pytest.mark.parametrize(
    ("operation", "named"),
    [
        (lambda x: x + 1, "aten.add"),
        (lambda x: torch.cat([x, x]), "aten.cat"),
        (lambda x: x.clone(), "aten.clone"),
        (lambda x: torch.zeros(3), "aten.zeros"),
        (lambda x: x.zero_(), "aten.zero_"),
        (lambda x: x.t().contiguous(), "aten.contiguous"),
        (lambda x: x[0, 0].item(), "item"),
        (lambda x: torch.tensor([1.0]), "values on the host"),
    ],
)
def test_what_cannot_be_captured_is_named(library: Library, operation, named: str) -> None:
    x, weight = torch.randn(2, 8), torch.randn(8)

    def forward() -> tuple[torch.Tensor, ...]:
        operation(ops.rms_norm(library, x, weight, EPS))
        return (x,)

    with torch.inference_mode(), pytest.raises(CaptureError, match=named):
        CpuGraph(library).warm_up(forward, is_breakable=False)


def test_views_and_empty_pass(library: Library) -> None:
    x, weight = torch.randn(2, 8), torch.randn(8)

    def forward() -> tuple[torch.Tensor, ...]:
        y = ops.rms_norm(library, x, weight, EPS)
        return (y.view(2, 2, 4)[:, 1].reshape(2, 4), torch.empty_like(y))

    with torch.inference_mode():
        graph = capture(CpuGraph(library), forward, 2, x)
        graph.replay(2, [x])
        assert torch.equal(graph.outputs[0], ops.rms_norm(library, x, weight, EPS)[:, 4:])


def test_a_breakable_capture_runs_other_operations_between_its_parts(library: Library) -> None:
    x, weight = torch.randn(4, 8), torch.randn(8)

    def forward() -> tuple[torch.Tensor, ...]:
        y = ops.rms_norm(library, x, weight, EPS)
        y = y * 2 + 1
        y.mul_(3)
        return (ops.rms_norm(library, y, weight, EPS),)

    with torch.inference_mode():
        mechanism = CpuGraph(library)
        graph = capture(mechanism, forward, 4, x, is_breakable=True)
        assert graph.num_breaks == 3
        x.copy_(torch.randn(4, 8))
        mechanism.poison()
        graph.replay(4, [x])
        assert torch.equal(graph.outputs[0], forward()[0])


def test_a_later_graph_may_not_outgrow_the_pool_of_earlier_ones(library: Library) -> None:
    weight = torch.randn(64)
    small, large = torch.randn(2, 64), torch.randn(200, 64)
    mechanism = CpuGraph(library)
    capture(mechanism, lambda: (ops.rms_norm(library, small, weight, EPS),), 2, small)
    with pytest.raises(CaptureError, match="larger ones captured before it"):
        capture(mechanism, lambda: (ops.rms_norm(library, large, weight, EPS),), 200, large)


def test_a_kernel_over_other_rows_than_the_graph_is_refused(library: Library) -> None:
    x, weight = torch.randn(4, 8), torch.randn(8)
    with pytest.raises(CaptureError, match="runs over 3 rows in a graph of 4"):
        capture(CpuGraph(library), lambda: (ops.rms_norm(library, x[:3], weight, EPS),), 4, x)


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 30), st.integers(0, 30)), max_size=40)
)
def test_no_two_living_tensors_overlap(drawn: list[tuple[int, int, int]]) -> None:
    spans = [Span(size, min(a, b), max(a, b)) for size, a, b in drawn]
    offsets, total = lay_out(spans)
    placed = list(zip(spans, offsets, strict=True))
    for i, (a, at) in enumerate(placed):
        assert at % 64 == 0 and at + a.num_bytes <= total
        for b, other in placed[:i]:
            apart = at + a.num_bytes <= other or other + b.num_bytes <= at
            assert apart or not a.meets(b)
