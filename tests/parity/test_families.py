"""Logits of every family through the paged path against transformers, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch

from polypath.runtime.engine import Engine
from polypath.tests import tiny_models
from polypath.tests.driving import YARDSTICK, build_engine, paged_logits
from polypath.tests.parity.reference import load_reference, reference_logits, relative_error

BOUND = 1e-4
LENGTHS = (70, 1, 33, 16, 17, 500)  # ragged, around page boundaries, and one long

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-group-1": ("llama", {"num_key_value_heads": 4}),
    "llama-group-3": (
        "llama",
        {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "llama-group-8": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    "llama-head-dim-64": ("llama", {"head_dim": 64}),
    "llama-rope-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-rope-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama-eps": ("llama", {"rms_norm_eps": 1e-2}),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 16}),
    "mistral-odd-window": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window-of-one-layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-biases-tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-head-dim-64": ("qwen3", {"head_dim": 64}),
}

Pair = tuple[Engine, list[list[int]], list[torch.Tensor]]


PATHS = {"yardstick": YARDSTICK, "planned": {}}


@pytest.fixture(scope="module", params=[f"{model} {path}" for model in MODELS for path in PATHS])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """An engine, ragged sequences, and what transformers says of them."""
    model, path = request.param.split()
    folder = tmp_path_factory.mktemp(model)
    name, config = MODELS[model]
    tiny_models.family(folder, name, seed=len(model), **config)
    reference = load_reference(folder)
    rng = Random(1)
    sequences = [[rng.randrange(260) for _ in range(n)] for n in LENGTHS]
    expected = [reference_logits(reference, ids) for ids in sequences]
    yield build_engine(folder, pages=32, **PATHS[path]), sequences, expected


def _assert_equal(pair: Pair, which: list[int], steps: list[list[int]]) -> None:
    engine, sequences, expected = pair
    found = paged_logits(engine, [sequences[i] for i in which], steps)
    errors = [relative_error(f, expected[i]) for f, i in zip(found, which, strict=True)]
    print("relative errors:", [f"{e:.1e}" for e in errors])
    assert max(errors) < BOUND


def test_prefill_alone(pair: Pair) -> None:
    for i, length in enumerate(LENGTHS[:5]):
        _assert_equal(pair, [i], [[length]])


def test_ragged_prefill_together(pair: Pair) -> None:
    _assert_equal(pair, [0, 1, 2, 3, 4], [list(LENGTHS[:5])])


def test_decode_token_by_token(pair: Pair) -> None:
    _assert_equal(pair, [2], [[1]] * LENGTHS[2])


@pytest.mark.parametrize("chunk", [7, 16, 64])
def test_chunked_prefill(pair: Pair, chunk: int) -> None:
    full, rest = divmod(LENGTHS[0], chunk)
    _assert_equal(pair, [0], [[chunk]] * full + [[rest]] * bool(rest))


def test_late_positions(pair: Pair) -> None:
    _assert_equal(pair, [5], [[128]] * 3 + [[115], [1]])


def test_prefills_and_decodes_mixed_in_one_batch(pair: Pair) -> None:
    steps = [[40, 0, 20, 0, 16], [1, 0, 1, 10, 1], *[[1, 0, 1, 1, 0]] * 6]
    steps += [[1, 1, 1, 0, 0], [22, 0, 5, 0, 0]]
    assert [sum(column) for column in zip(*steps, strict=True)] == list(LENGTHS[:5])
    _assert_equal(pair, [0, 1, 2, 3, 4], steps)
