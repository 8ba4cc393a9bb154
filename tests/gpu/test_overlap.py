"""On a card: steps overlap, no launch waits for the device, and no answer changes for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from polypath.runtime.engine import Engine
from polypath.runtime.overlap import Overlap
from polypath.runtime.scheduler import ScheduledRow
from polypath.tests import tiny_models
from polypath.tests.driving import build_engine, finish, prompts, request, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tiny_models.random(path, hidden=256)
    return path


def engine_of(folder: Path, depth: int) -> Engine:
    return build_engine(
        folder, pages=400, device="cuda", dtype="float32", overlap_depth=depth, max_num_seqs=8
    )


def test_the_plan_overlaps_by_default(folder: Path) -> None:
    assert build_engine(folder, pages=40, device="cuda").plan.overlap_depth == 1


def test_greedy_and_seeded_answers_are_those_of_depth_0(folder: Path) -> None:
    sampled = {"temperature": 1.0, "seed": 5, "top_p": 0.9, "top_k": 30}
    requests = [
        request(f"r{i}", ids, max_tokens=12, ignore_eos=True, **(sampled if i % 2 else {}))
        for i, ids in enumerate(prompts(8))
    ]
    late = engine_of(folder, 1)
    found, expected = run(late, requests), run(engine_of(folder, 0), requests)
    assert {n: a.token_ids for n, a in found.items()} == {
        n: a.token_ids for n, a in expected.items()
    }
    assert late.counters.overlap[Overlap.OVERLAPPED] > 10


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.9, "seed": 1}])
def test_a_launch_waits_for_nothing(
    folder: Path, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(folder, 1)
    for i in range(4):
        engine.submit(request(f"r{i}", [5 + i] * 9, max_tokens=20, ignore_eos=True, **sampling))
    for _ in range(4):  # kernels are compiled and pinned memory is taken
        engine.step()
    launch = engine._launch

    def watched(rows: list[ScheduledRow], began: float) -> object:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(rows, began)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(engine, "_launch", watched)
    for _ in range(8):
        outputs = engine.step()
        assert all(output.error is None for output in outputs)
    finish(engine)
