"""Perplexity and continuations: against torch's own loss, against itself, against other weights."""

from __future__ import annotations

import math

import pytest
import torch

from polypath.runtime.engine import Engine
from polypath.runtime.quality import Continuation, compare, continuations, log_likelihood, pieces
from polypath.tests import tiny_models
from polypath.tests.driving import build_yardstick, paged_logits

TEXT = [4 + (7 * i) % 250 for i in range(100)]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Engine]:
    """Two models of other weights."""
    folders = [tmp_path_factory.mktemp(f"model{seed}") for seed in (0, 1)]
    for seed, folder in enumerate(folders):
        tiny_models.random(folder, seed)
    one, two = (build_yardstick(f, pages=60, max_model_len=128) for f in folders)
    return one, two


def test_the_sum_is_that_of_torchs_cross_entropy_window_by_window(
    engines: tuple[Engine, Engine],
) -> None:
    engine, _ = engines
    total, count = log_likelihood(engine, TEXT, window=40)
    expected = 0.0
    for part in (TEXT[:40], TEXT[40:80], TEXT[80:]):
        (logits,) = paged_logits(engine, [part], [[len(part)]])
        loss = torch.nn.functional.cross_entropy(
            logits[:-1], torch.tensor(part[1:]), reduction="sum"
        )
        expected -= float(loss)
    assert count == 100 - 3
    assert total == pytest.approx(expected, rel=1e-5)


def test_an_engine_equals_itself(engines: tuple[Engine, Engine]) -> None:
    engine, _ = engines
    found = compare(engine, engine, TEXT, window=50, num_prompts=3, prompt_tokens=8, new_tokens=6)
    assert found.ratio == 1.0 and found.share_held == 1.0
    assert found.num_scored == 98
    assert [c.differs_at for c in found.continuations] == [None] * 3


def test_the_gap_is_the_references_own(engines: tuple[Engine, Engine]) -> None:
    one, two = engines
    (found,) = continuations(one, two, [TEXT[:8]], 4)
    assert found.differs_at == 0  # other weights part at once
    (logits,) = paged_logits(two, [TEXT[:8]], [[8]])
    (ours,) = paged_logits(one, [TEXT[:8]], [[8]])
    scores = logits[-1].log_softmax(-1)
    gap = float(scores.max() - scores[ours[-1].argmax()])
    is_rival = int(ours[-1].argmax()) in scores.topk(20).indices.tolist()
    assert found.gap == (pytest.approx(gap, abs=1e-4) if is_rival else None)


@pytest.mark.parametrize(
    ("found", "holds"),
    [
        (Continuation(differs_at=None), True),
        (Continuation(differs_at=3, gap=0.1), True),
        (Continuation(differs_at=3, gap=0.5), False),
        (Continuation(differs_at=3, gap=None), False),
    ],
)
def test_only_a_near_tie_excuses_a_difference(found: Continuation, holds: bool) -> None:
    assert found.holds is holds


def test_pieces_reach_from_the_start_to_the_end() -> None:
    found = pieces(TEXT, 5, 20)
    assert [p[0] for p in found] == [TEXT[i] for i in (0, 20, 40, 60, 80)]
    assert pieces(TEXT, 1, 100) == [TEXT]
    assert math.isclose(len(found[-1]), 20)
