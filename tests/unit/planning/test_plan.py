"""The plan as a value: JSON and fingerprint."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest

from polypath.runtime.errors import ConfigurationError
from polypath.runtime.forward_mode import ForwardMode
from polypath.runtime.planning.hardware import (
    load_hardware,
)
from polypath.runtime.planning.plan import ExecutionPlan
from polypath.runtime.planning.planner import plan
from polypath.tests.unit.planning.asking import PROFILES, wishes


@pytest.mark.parametrize("profile", PROFILES)
def test_a_plan_survives_json(model, profile) -> None:
    found = plan(load_hardware(profile), model, wishes()).with_event("self_check", "all equal")
    data = json.loads(json.dumps(found.to_json()))
    assert ExecutionPlan.from_json(data) == found
    assert data["fingerprint"] == found.fingerprint()
    with pytest.raises(ConfigurationError, match="unknown keys surprise"):
        ExecutionPlan.from_json(data | {"surprise": 1})


def test_the_fingerprint_ignores_memory_and_knows_what_decides(avx2, model) -> None:
    base = plan(avx2, model, wishes())
    assert base.fingerprint().startswith("pp-") and len(base.fingerprint()) == 15
    less = replace(avx2, memory=replace(avx2.memory, free_bytes=4 * 10**9))
    assert plan(less, model, wishes()).fingerprint() == base.fingerprint()
    assert base.with_event("ladder", "x").fingerprint() == base.fingerprint()
    others = [
        plan(avx2, model, wishes(dtype="bfloat16")),
        plan(avx2, model, wishes(page_size=32)),
        plan(avx2, replace(model, num_layers=29), wishes()),
        plan(load_hardware("t4"), model, wishes()),
        base.with_path(replace(base.paths[ForwardMode.DECODE], runner="eager")),
    ]
    names = [base.fingerprint(), *(other.fingerprint() for other in others)]
    assert all(a != b for a, b in itertools.combinations(names, 2))
