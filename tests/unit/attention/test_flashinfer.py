"""The adapter of FlashInfer over its wrappers in torch (tests/fake_flashinfer.py): through a tiny
engine, eager and on the GPU's graph runners.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from polypath.runtime.attention.flashinfer import FlashInferBackend, FlashInferCaptured
from polypath.runtime.build_context import BuildContext
from polypath.runtime.forward_mode import ForwardMode
from polypath.runtime.graphs.recording import Recording
from polypath.runtime.runners.static_batch import StaticBatch
from polypath.tests import fake_flashinfer
from polypath.tests.driving import build_yardstick
from polypath.tests.fake_cuda import FakeCuda
from polypath.tests.graph_engine import FakedCudaGraph, MakeMechanism, parts_of
from polypath.tests.graph_parity import assert_parity

MECHANISMS = [
    FakedCudaGraph,
    pytest.param(None, marks=pytest.mark.slow),
    pytest.param(Recording, marks=pytest.mark.slow),
]


def backend(context: BuildContext) -> FlashInferBackend:
    return FlashInferBackend(
        context.model, context.dtype, context.device, fake_flashinfer.module, cuda=FakeCuda()
    )


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_gives_the_tokens_of_the_yardstick(
    random_llama: Path, mechanism: MakeMechanism | None
) -> None:
    engine = assert_parity(random_llama, backend, mechanism=mechanism)
    if mechanism is not None:
        steps = engine.counters.steps
        planned = sum(n for (_, _, reason), n in steps.items() if reason == "planned")
        assert planned >= 0.8 * sum(steps.values()), steps


def test_layers_with_and_without_a_window_have_wrappers_of_their_own(random_llama: Path) -> None:
    assert_parity(random_llama, backend, has_window=True, mechanism=Recording)


@pytest.fixture
def context(random_llama: Path) -> BuildContext:
    return parts_of(build_yardstick(random_llama, pages=20), backend).context


def static_batch(rows: int) -> Any:
    static = StaticBatch(
        tokens=rows, rows=rows, max_pages=8, page_size=16, device=torch.device("cpu")
    )
    return static.batch(ForwardMode.DECODE)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "uses"), [(8, 8, False), (8, 4, False), (32, 8, True), (20, 4, True)]
)
def test_four_query_heads_a_key_head_use_tensor_cores(
    context: BuildContext, heads: int, kv_heads: int, uses: bool
) -> None:
    model = replace(context.model, num_heads=heads, num_kv_heads=kv_heads)
    made = backend(replace(context, model=model))
    assert made.uses_tensor_cores is uses
    captured = made.prepare_capture(static_batch(2))
    assert all(w.use_tensor_cores is uses for w in captured._wrappers.values())


def test_a_step_replans_the_wrappers_of_its_size_without_a_full_plan(context: BuildContext) -> None:
    made = backend(context)
    captured = made.prepare_capture(static_batch(4))
    (wrapper,) = captured._wrappers.values()
    assert wrapper.num_full_plans == 1
    table = captured._table
    table[0, :3] = torch.tensor([5, 9, 2], dtype=torch.int32)
    table[1, :1] = 7
    live = static_batch(2)
    captured.refresh(replace(live, kv_lens=(35, 16)))
    assert wrapper.num_full_plans == 1
    assert wrapper.indptr.tolist() == [0, 3, 4, 5, 6], "padding has one page each"
    assert wrapper.indices[:6].tolist() == [5, 9, 2, 7, 0, 0]
    assert wrapper.last_page_len.tolist() == [3, 16, 1, 1]
    assert wrapper._kv_lens.tolist() == [35, 16, 1, 1]


def test_a_plan_waits_until_the_last_one_has_left_the_host(context: BuildContext) -> None:
    made = backend(context)
    cuda: FakeCuda = made.cuda
    made.plan(static_batch(2))
    first = dict(cuda.streams.default.known)
    cuda.streams.write(torch.ones(1))  # work that the plan's event does not cover
    made.plan(static_batch(2))
    assert cuda.streams.host == first, "for the plan, not for what came after it"


@pytest.mark.slow
def test_a_stale_plan_shows(random_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlashInferCaptured, "refresh", lambda self, batch: None)
    with pytest.raises(AssertionError):
        assert_parity(random_llama, backend, mechanism=Recording)


def test_a_keyword_that_flashinfer_does_not_know_fails(context: BuildContext) -> None:
    made = backend(context)
    with pytest.raises(TypeError, match="window_lef"):
        made._decode[None].plan(
            *(torch.zeros(2, dtype=torch.int32),) * 3, 4, 2, 16, 16, window_lef=3
        )
