"""Rows of the bench: medians, shares of the roofline, and what is printed of them."""

from __future__ import annotations

import pytest

from polypath.deployments.bench_view import Row, render_bench
from polypath.runtime.bench import Measurement, Workload
from polypath.runtime.ceilings import Ceilings
from polypath.runtime.roofline import ModelCost
from polypath.tests.unit.test_roofline import CONFIG

DECODE = Workload(batch=4, prompt_tokens=16, new_tokens=8)
TOP = Ceilings(threads=2, read_gb_s=1e-3, int8_gop_s=1e6, fp32_gflop_s=1e6)  # 1 MB/s


def run(rate: float, steps: dict[str, int] | None = None) -> Measurement:
    return Measurement(
        workload=DECODE,
        prefill_tokens_s=10 * rate,
        decode_tokens_s=rate,
        step_ms=4e3 / rate,
        forward_ms=3e3 / rate,
        host_ms=1e3 / rate,
        steps=steps or {},
    )


def test_the_share_is_the_least_time_over_the_measured_time() -> None:
    """900 bytes of weights and 4 x 20 tokens of keys and values, 64 bytes each, at 1 MB/s."""
    cost = ModelCost(
        config=CONFIG, weight_bytes=1000, embedding_bytes=100, kv_itemsize=4, is_int8=True
    )
    row = Row.of("polypath", [run(200.0)]).with_roofline(cost, TOP, budget=512)
    step_s = 4 / 200.0
    assert row.decode_roofline is not None
    assert row.decode_roofline.share == pytest.approx((900 + 80 * 64) / 1e6 / step_s)
    assert row.decode_roofline.bound == "read"


def test_spread_and_median_of_runs() -> None:
    row = Row.of("polypath", [run(100.0), run(150.0), run(120.0)])
    assert (row.runs, row.spread, row.rate) == (3, 1.5, 120.0)


def test_the_table_tells_ratios_busy_shares_and_runners(
    capsys: pytest.CaptureFixture[str],
) -> None:
    steps = {"decode cpu_graph planned": 3, "decode eager batch_too_large": 1}
    rows = [
        Row.of("polypath", [run(100.0, steps)]),
        Row.of("polypath eager", [run(90.0)]),
        Row.of("llama.cpp", [run(40.0)]),
        Row.of("transformers", [run(50.0)]),
        Row.of("polypath", [run(60.0)], is_busy=True),
        Row.of("llama.cpp", [run(10.0)], is_busy=True),
    ]
    render_bench(rows, ["the machine"])
    text = capsys.readouterr().out
    assert "batch 4, 16 + 8: 2.00 x transformers" in text
    assert "batch 4, 16 + 8, busy: 6.00 x llama.cpp" in text
    assert "polypath: 60% of its quiet rate" in text
    assert "llama.cpp: 25% of its quiet rate" in text
    assert "decode cpu_graph planned 75.0%, decode eager batch_too_large 25.0%" in text
    assert "the machine" in text
