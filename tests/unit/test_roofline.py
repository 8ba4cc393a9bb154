"""Roofline arithmetic, on a model small enough to count by hand."""

from __future__ import annotations

import pytest

from polypath.runtime.ceilings import Ceilings
from polypath.runtime.config import ModelConfig, RopeConfig
from polypath.runtime.roofline import Cost, ModelCost

# 2 layers: q 8x8, k and v 4x8 each, o 8x8, three of 16x8; head 10x8.
CONFIG = ModelConfig(
    family="llama",
    architecture="llama",
    vocab_size=10,
    hidden_size=8,
    intermediate_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    max_position=64,
    rms_norm_eps=1e-6,
    rope=RopeConfig(),
)
LAYERS = 2 * (8 * 8 + 2 * 4 * 8 + 8 * 8 + 3 * 16 * 8)
HEAD = 10 * 8
COST = ModelCost(config=CONFIG, weight_bytes=1000, embedding_bytes=100, kv_itemsize=4, is_int8=True)
TOP = Ceilings(threads=2, read_gb_s=10.0, int8_gop_s=200.0, fp32_gflop_s=100.0)


def test_a_decode_step_reads_weights_once_and_the_keys_and_values_of_each_row() -> None:
    cost = COST.decode(batch=3, context=20)
    kv_of_a_token = 2 * 2 * 1 * 4 * 4  # k and v, layers, heads, width, bytes
    assert cost.read_bytes == 900 + 3 * 20 * kv_of_a_token
    assert cost.linear_macs == 3 * (LAYERS + HEAD)
    assert cost.attention_macs == 3 * 20 * (2 * 2 * 2 * 4)


def test_a_prompt_reads_weights_once_a_step_and_needs_one_row_of_logits() -> None:
    cost = COST.prefill(batch=1, tokens=12, budget=5)
    assert cost.read_bytes == 3 * 900
    assert cost.linear_macs == 12 * LAYERS + HEAD
    assert cost.attention_macs == (12 * 13 / 2) * (2 * 2 * 2 * 4)


def test_the_longer_of_reading_and_computing_bounds() -> None:
    reading = Cost(read_bytes=10e9, linear_macs=50e9, attention_macs=0.0)
    assert reading.roofline(TOP, is_int8=True) == (1.0, "read")
    computing = Cost(read_bytes=1e9, linear_macs=50e9, attention_macs=25e9)
    assert computing.roofline(TOP, is_int8=True) == (1.0, "compute")
    assert computing.roofline(TOP, is_int8=False) == (1.5, "compute")


def test_the_best_of_two_measurements_is_the_roof() -> None:
    other = Ceilings(threads=2, read_gb_s=12.0, int8_gop_s=150.0, fp32_gflop_s=101.0)
    assert TOP.best(other) == Ceilings(
        threads=2, read_gb_s=12.0, int8_gop_s=200.0, fp32_gflop_s=101.0
    )


@pytest.mark.filterwarnings("error")
def test_ceilings_are_measured_and_leave_torchs_threads_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    from polypath.runtime import ceilings as module

    monkeypatch.setattr(module, "BUFFER_FLOATS", 1 << 20)
    monkeypatch.setattr(module, "SHAPES", ((64, 64, 64),))
    before = torch.get_num_threads()
    found = module.ceilings(before + 1, repeats=1)
    assert torch.get_num_threads() == before
    assert found.threads == before + 1
    assert min(found.read_gb_s, found.int8_gop_s, found.fp32_gflop_s) > 0
