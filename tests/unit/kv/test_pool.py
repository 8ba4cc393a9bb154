"""The tensors of the KV pool."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from polypath.runtime.config import ModelConfig, RopeConfig
from polypath.runtime.kv.pool import KVPool

MODEL = ModelConfig(
    family="llama",
    architecture="LlamaForCausalLM",
    vocab_size=10,
    hidden_size=12,
    intermediate_size=8,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    max_position=32,
    rms_norm_eps=1e-6,
    rope=RopeConfig(),
)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_one_zeroed_tensor_a_layer_with_keys_and_values_side_by_side() -> None:
    pool = KVPool(MODEL, num_pages=5, page_size=4, dtype=torch.float32, device=torch.device("cpu"))
    assert [tuple(layer.shape) for layer in pool.layers] == [(5, 2, 4, 2, 6)] * 3
    assert all(not layer.any() for layer in pool.layers)
    assert pool.layers[0][:, 0].stride() == pool.layers[0][:, 1].stride()


def test_takes_the_bytes_that_the_model_config_says() -> None:
    pool = KVPool(MODEL, num_pages=5, page_size=4, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert pool.num_bytes == 5 * 4 * MODEL.kv_bytes_per_token(itemsize=2)


def test_touching_takes_the_memory_of_first_pages_and_leaves_them_zero() -> None:
    """The first step of an engine waited 0.12 s for it."""
    pool = KVPool(
        MODEL, num_pages=1 << 16, page_size=4, dtype=torch.float32, device=torch.device("cpu")
    )
    before = resident_bytes()
    pool.touch()
    assert resident_bytes() - before >= len(pool.layers) * 4096
    assert not any(layer[:2].any() for layer in pool.layers)


def test_touching_a_pool_elsewhere_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card it would be one more operation, amid a capture."""
    pool = KVPool(MODEL, num_pages=5, page_size=4, dtype=torch.float32, device=torch.device("meta"))
    monkeypatch.setattr(torch, "_foreach_zero_", lambda tensors: pytest.fail("it ran"))
    pool.touch()
