"""The rules one by one, and how candidates compose into paths."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from polypath.runtime.config import ModelConfig
from polypath.runtime.forward_mode import ForwardMode
from polypath.runtime.planning import rules
from polypath.runtime.planning.capability import Capability
from polypath.runtime.planning.hardware import (
    Hardware,
    load_hardware,
)
from polypath.runtime.planning.planner import plan
from polypath.runtime.planning.rules import RULES, Situation, why_not
from polypath.runtime.planning.selection import REGISTRIES
from polypath.tests.unit.planning.asking import refused, wishes


def situation(hardware: Hardware, model: ModelConfig, **values: Any) -> Situation:
    defaults: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "kv_dtype": "float32",
        "page_size": 16,
    }
    return Situation(hardware=hardware, model=model, **(defaults | values))


def capability(**values: Any) -> Capability:
    defaults: dict[str, Any] = {"name": "x", "kind": "attention", "source": "x.py"}
    defaults["devices"] = ("cpu",)
    return Capability(**(defaults | values))


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"devices": ("cuda",)}, "device"),
        ({"architectures": ("aarch64",)}, "architecture"),
        ({"required_isa": ("avx512f",)}, "isa"),
        ({"packages": ("flashinfer",)}, "package"),
        ({"packages": ("safetensors>=99.1",)}, "package"),
        ({"dtypes": ("float16",)}, "dtype"),
        ({"dtypes_on_device": (("cpu", ("float16",)),)}, "dtype"),
        ({"kv_dtypes": ("float16",)}, "kv_dtype"),
        ({"page_sizes": (256,)}, "page_size"),
        ({"head_dims": (128,)}, "head_dim"),
        ({"max_group_size": 2}, "group_size"),
        ({}, "sliding_window"),
        ({"modes": (ForwardMode.PREFILL,)}, "mode"),
        ({"built": False}, "adapter"),
    ],
)
def test_each_rule_refuses_what_it_is_for(avx2, model, values, rule) -> None:
    windowed = replace(model, layer_windows=(None, 512))
    asked = capability(sliding_window=rule != "sliding_window", **values)
    found = why_not(asked, situation(avx2, windowed, mode=ForwardMode.DECODE))
    assert [refusal.rule for refusal in found] == [rule]


def test_a_record_without_claims_fits_the_plain_case(avx2, model) -> None:
    assert why_not(capability(packages=("safetensors>=0.8",)), situation(avx2, model)) == []


def test_no_rule_depends_on_the_order_of_rules(model, monkeypatch) -> None:
    h100, asked = load_hardware("t4"), wishes()
    expected = plan(h100, model, asked)
    shuffled = list(RULES)
    random.Random(0).shuffle(shuffled)
    monkeypatch.setattr(rules, "RULES", tuple(shuffled))
    found = plan(h100, model, asked)
    assert found.paths == expected.paths
    assert refused(found) == refused(expected)


def test_a_better_candidate_that_fits_is_taken(avx2, model, monkeypatch) -> None:
    from polypath.runtime.planning import candidate, selection

    better = candidate.Candidate("swift", record=capability(name="swift", page_sizes=(64, 128)))
    candidates = (better, *REGISTRIES["attention"])
    monkeypatch.setitem(selection.REGISTRIES, "attention", candidates)
    found = plan(avx2, model, wishes())
    assert found.paths[ForwardMode.DECODE].attention_backend == "swift" and found.page_size == 64
    kept = plan(avx2, model, wishes(page_size=16))
    assert kept.paths[ForwardMode.DECODE].attention_backend == "cpu_native"
    assert refused(kept)["attention/swift"] == {"page_size"}


def test_a_candidate_for_one_mode_runs_beside_others(avx2, model, monkeypatch) -> None:
    from polypath.runtime.planning import candidate, selection

    record = capability(name="half", modes=(ForwardMode.DECODE,))
    candidates = (candidate.Candidate("half", record=record), *REGISTRIES["attention"])
    monkeypatch.setitem(selection.REGISTRIES, "attention", candidates)
    found = plan(avx2, model, wishes(attention_backend="half"))
    backends = {mode: path.attention_backend for mode, path in found.paths.items()}
    assert backends[ForwardMode.DECODE] == "half"
    assert backends[ForwardMode.PREFILL] == backends[ForwardMode.MIXED] == "cpu_native"
    assert any("half does not run prefill, mixed batches" in note for note in found.notes)
