"""The rules one by one, and how candidates compose into paths."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from polypath.runtime.config import ModelConfig
from polypath.runtime.forward_mode import ForwardMode
from polypath.runtime.planning import priorities, rules
from polypath.runtime.planning.capability import Capability
from polypath.runtime.planning.device import CARD_RULES, DEVICE_RULES
from polypath.runtime.planning.dtypes import DTYPE_RULES
from polypath.runtime.planning.hardware import (
    Hardware,
    load_hardware,
)
from polypath.runtime.planning.planner import plan
from polypath.runtime.planning.priorities import CPU_CLASSES, GPU_CLASSES, PRIORITIES
from polypath.runtime.planning.rules import RULES, Situation, why_not, why_not_together
from polypath.runtime.planning.rules_model import PAIR_RULES
from polypath.runtime.planning.rules_node import package_problem
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
    defaults: dict[str, Any] = {"name": "torch_sdpa", "kind": "attention", "source": "x.py"}
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
        ({"name": "surprise"}, "device_class"),
        ({"soft_cap": False}, "soft_cap"),
        ({"attention_sinks": False}, "attention_sinks"),
        ({"draft_width": 3}, "speculation.width"),
        ({"draft_trees": False}, "speculation.tree"),
    ],
)
def test_each_rule_refuses_what_it_is_for(avx2, model, values, rule) -> None:
    demanding = replace(
        model, layer_windows=(None, 512), attention_soft_cap=50.0, attention_sinks=True
    )
    able = {"soft_cap": True, "attention_sinks": True, "draft_width": 8, "draft_trees": True}
    asked = capability(sliding_window=rule != "sliding_window", **(able | values))
    asked_for = {"mode": ForwardMode.DECODE, "draft_width": 4, "is_draft_tree": True}
    found = why_not(asked, situation(avx2, demanding, **asked_for))
    assert [refusal.rule for refusal in found] == [rule]


@pytest.mark.parametrize(
    ("requirement", "problem"),
    [
        ("safetensors>=0.8,<1", None),
        ("safetensors>=99.1", "safetensors 0.8.0 is older than 99.1"),
        ("safetensors<0.8", "safetensors 0.8.0 is not older than 0.8"),
        ("triton", "triton is not installed"),
    ],
)
def test_versions_have_bounds(avx2, requirement, problem) -> None:
    assert package_problem(requirement, avx2) == problem


def test_rules_have_ids_of_their_own_and_sources() -> None:
    every = (*RULES, *PAIR_RULES, *DEVICE_RULES, *CARD_RULES, *DTYPE_RULES)
    ids = [each.id for each in every]
    assert len(ids) == len(set(ids))
    assert all(each.source and each.refuses for each in every)


@pytest.mark.parametrize(
    ("level", "fitting"),
    [
        ("never", set()),
        ("single_token", {"decode"}),
        ("uniform", {"decode", "verify"}),
        ("always", {"decode", "verify", "prefill", "mixed"}),
    ],
)
def test_a_graph_of_whole_steps_needs_what_its_mode_needs(level, fitting) -> None:
    modes = (ForwardMode.DECODE, ForwardMode.VERIFY, ForwardMode.PREFILL, ForwardMode.MIXED)
    runner = capability(name="graph", kind="runner", captures_attention=True)
    attention = capability(graph_support=level)
    found = {str(m) for m in modes if why_not_together(runner, [attention], m) is None}
    assert found == fitting


def test_every_candidate_is_on_a_list_and_every_list_names_candidates() -> None:
    for kind, lists in PRIORITIES.items():
        known = {candidate.name for candidate in REGISTRIES[kind]}
        assert set(lists) == {*GPU_CLASSES, *CPU_CLASSES}
        assert known == {name for names in lists.values() for name in names}
        assert all(len(names) == len(set(names)) for names in lists.values())


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

    monkeypatch.setitem(priorities.ATTENTION, "cpu_avx2", ("swift", "cpu_native", "torch_sdpa"))
    record = capability(
        name="swift", page_sizes=(64, 128), graph_support="always", native_kernels=True
    )
    better = candidate.Candidate("swift", record=record)
    candidates = (better, *REGISTRIES["attention"])
    monkeypatch.setitem(selection.REGISTRIES, "attention", candidates)
    found = plan(avx2, model, wishes())
    assert found.paths[ForwardMode.DECODE].attention_backend == "swift" and found.page_size == 64
    kept = plan(avx2, model, wishes(page_size=16))
    assert kept.paths[ForwardMode.DECODE].attention_backend == "cpu_native"
    assert refused(kept)["attention/swift"] == {"page_size"}


def test_a_candidate_for_one_mode_runs_beside_others(avx2, model, monkeypatch) -> None:
    from polypath.runtime.planning import candidate, selection

    monkeypatch.setitem(priorities.ATTENTION, "cpu_avx2", ("half", "cpu_native", "torch_sdpa"))
    record = capability(name="half", modes=(ForwardMode.DECODE,))
    candidates = (candidate.Candidate("half", record=record), *REGISTRIES["attention"])
    monkeypatch.setitem(selection.REGISTRIES, "attention", candidates)
    found = plan(avx2, model, wishes(attention_backend="half"))
    backends = {mode: path.attention_backend for mode, path in found.paths.items()}
    assert backends[ForwardMode.DECODE] == "half"
    assert backends[ForwardMode.PREFILL] == backends[ForwardMode.MIXED] == "cpu_native"
    assert any("half does not run prefill, mixed batches" in note for note in found.notes)
