"""Case 20: beyond the sliding window, in every phase and chunking, with cache, preempted."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from polypath.runtime.errors import ModelError
from polypath.runtime.request import Request
from polypath.tests import tiny_models
from polypath.tests.driving import (
    Answer,
    assert_same_greedy,
    build_yardstick,
    paged_logits,
    request,
    run,
)
from polypath.tests.parity.reference import (
    load_reference,
    reference_greedy,
    reference_logits,
    relative_error,
)

WINDOW, LENGTHS, NUM_NEW = 16, (10, 16, 17, 33, 120), 40
MISTRAL: dict[str, Any] = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Mistral with a small window."""
    path = tmp_path_factory.mktemp("windowed")
    tiny_models.random(path, config=MISTRAL | {"sliding_window": WINDOW})
    return path


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Greedy requests of all lengths."""
    rng = Random(0)
    prompts = [[rng.randrange(4, 260) for _ in range(length)] for length in LENGTHS]
    return [
        request(str(i), ids, max_tokens=NUM_NEW, ignore_eos=True, logprobs=2)
        for i, ids in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def expected(folder: Path, requests: list[Request]) -> dict[str, list[int]]:
    """What transformers says."""
    model = load_reference(folder)
    return {r.id: reference_greedy(model, r.prompt_ids, NUM_NEW) for r in requests}


def _check(found: dict[str, Answer], expected: dict[str, list[int]]) -> None:
    for name, answer in found.items():
        assert_same_greedy(expected[name], answer)


@pytest.mark.parametrize("page_size", [4, 16, 64])
@pytest.mark.parametrize("budget", [7, 16, 64])
def test_says_what_transformers_says(
    folder: Path,
    requests: list[Request],
    expected: dict[str, list[int]],
    budget: int,
    page_size: int,
) -> None:
    engine = build_yardstick(
        folder,
        pages=1600 // page_size,
        page_size=page_size,
        max_num_batched_tokens=budget,
        max_num_seqs=5,
    )
    _check(run(engine, requests), expected)
    _check(run(engine, requests), expected)  # from the prefix cache


def test_says_the_same_when_preempted(
    folder: Path, requests: list[Request], expected: dict[str, list[int]]
) -> None:
    engine = build_yardstick(folder, pages=42, page_size=4, max_model_len=164)
    _check(run(engine, requests), expected)
    assert engine.stats()["preemptions_total"]


@pytest.mark.parametrize("window", [1, 2, 5, 15, 16, 17, 64])
def test_logits_equal_transformers_in_prefill_chunks_and_decodes(
    tmp_path: Path, window: int
) -> None:
    tiny_models.random(tmp_path, config=MISTRAL | {"sliding_window": window})
    engine, model = build_yardstick(tmp_path, pages=40), load_reference(tmp_path)
    ids = torch.randint(4, 260, (80,), generator=torch.Generator().manual_seed(1)).tolist()
    reference = reference_logits(model, ids)
    for steps in ([[80]], [[7]] * 11 + [[3]], [[16]] * 5, [[40]] + [[1]] * 40):
        (found,) = paged_logits(engine, [ids], steps)
        assert relative_error(found, reference) < 1e-4


@pytest.mark.parametrize("window", [None, 0])
def test_no_window_means_none_or_is_refused(tmp_path: Path, window: int | None) -> None:
    tiny_models.random(tmp_path, config=MISTRAL | {"sliding_window": window})
    try:
        engine = build_yardstick(tmp_path, pages=40)
    except ModelError as error:
        assert "sliding_window" in str(error)
        assert window == 0
        return
    assert not any(engine.model.config.layer_windows)
