"""What was planned of the memory, beside what a start measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from polypath.runtime import measured as measured_module
from polypath.runtime.config import EngineConfig
from polypath.runtime.measured import Activations, with_measured
from polypath.runtime.planning.hardware import load_hardware
from polypath.runtime.planning.plan import ExecutionPlan
from polypath.runtime.planning.rules import native_variant
from polypath.runtime.startup import start

HAS_NATIVE = native_variant(load_hardware("this")) is not None


@pytest.mark.parametrize("runner", ["auto", "eager"])
def test_a_start_measures_what_was_planned(random_llama: Path, runner: str) -> None:
    config = EngineConfig(model=str(random_llama), kv_bytes=4 << 20, max_num_seqs=8, runner=runner)
    stages: dict[str, str] = {}
    found = start(config, on_progress=lambda e: stages.update({e.stage: e.message})).plan
    measured, planned = found.measured, found.memory
    assert measured is not None
    assert measured.kv_bytes == planned.kv_bytes
    assert 0 < measured.weights_bytes <= 1.05 * planned.weights_bytes
    assert measured.graph_bytes <= planned.graph_bytes
    assert (measured.graph_bytes > 0) == (HAS_NATIVE and runner == "auto")
    assert measured.activation_bytes is not None and measured.activation_bytes >= 0
    assert "largest step was not run" in measured.activation_origin
    assert measured.peak_bytes > measured.weights_bytes and "resident" in measured.peak_origin
    assert "activation" in stages["memory"] and "planned" in stages["memory"]
    (event,) = (event.message for event in found.events if event.stage == "memory")
    assert event.startswith("weights ") and "planned" in event and "peak" in event
    assert ExecutionPlan.from_json(found.to_json()) == found


def test_without_the_kernels_figures_activations_are_said_not_to_be_measured(
    random_llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(measured_module, "STATUS", tmp_path / "missing")
    config = EngineConfig(model=str(random_llama), kv_bytes=4 << 20, self_check=False)
    found = start(config).plan
    assert found.measured is not None and found.measured.activation_bytes is None
    assert found.measured.activation_origin.startswith("not measured: ")
    (event,) = (event.message for event in found.events if event.stage == "memory")
    assert "activation not measured (planned" in event


def test_what_leaves_less_than_the_reserve_is_a_warning(random_llama: Path) -> None:
    config = EngineConfig(model=str(random_llama), kv_bytes=4 << 20, self_check=False)
    started = start(config)
    plan = replace(started.plan, events=())
    for spare, warnings in ((1 << 30, 0), (-(1 << 20), 1)):
        limit = plan.kv_bytes + (1 << 30) + plan.memory.reserve_bytes + spare
        tight = replace(plan, memory=replace(plan.memory, limit_bytes=limit))
        step = Activations(num_bytes=1 << 30, origin="made up")
        found = with_measured(tight, 0, started.kv, (), activations=step)
        told = [e.message for e in found.events if e.message.startswith("warning: ")]
        assert len(told) == warnings
    assert "less than the reserve" in told[0] and "--max-num-batched-tokens" in told[0]
