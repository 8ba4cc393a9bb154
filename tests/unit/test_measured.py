"""What was planned of the memory, beside what a start measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from polypath.runtime.config import EngineConfig
from polypath.runtime.planning.hardware import load_hardware
from polypath.runtime.planning.plan import ExecutionPlan
from polypath.runtime.planning.rules import native_variant
from polypath.runtime.startup import start

HAS_NATIVE = native_variant(load_hardware("this")) is not None


@pytest.mark.parametrize("runner", ["auto", "eager"])
def test_a_start_measures_what_was_planned(random_llama: Path, runner: str) -> None:
    config = EngineConfig(model=str(random_llama), kv_bytes=4 << 20, max_num_seqs=8, runner=runner)
    found = start(config).plan
    measured, planned = found.measured, found.memory
    assert measured is not None
    assert measured.kv_bytes == planned.kv_bytes
    assert 0 < measured.weights_bytes <= 1.05 * planned.weights_bytes
    assert measured.graph_bytes <= planned.graph_bytes
    assert (measured.graph_bytes > 0) == (HAS_NATIVE and runner == "auto")
    assert measured.peak_bytes > measured.weights_bytes and "resident" in measured.peak_origin
    (event,) = (event.message for event in found.events if event.stage == "memory")
    assert event.startswith("weights ") and "planned" in event and "peak" in event
    assert ExecutionPlan.from_json(found.to_json()) == found
