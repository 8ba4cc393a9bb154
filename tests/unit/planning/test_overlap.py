"""Steps overlap on a card and not on a CPU, unless the user says otherwise."""

from __future__ import annotations

import pytest

from polypath.runtime.checkpoint.source import open_checkpoint
from polypath.runtime.config import EngineConfig
from polypath.runtime.planning.hardware import load_hardware
from polypath.runtime.planning.planner import plan


@pytest.mark.parametrize(
    ("profile", "wish", "depth", "origin"),
    [
        ("h100", None, 1, "default"),
        ("h100", 0, 0, "user"),
        ("avx2", None, 0, "default"),
        ("avx2", 1, 1, "user"),
    ],
)
def test_the_plan_chooses_the_depth(
    profile: str, wish: int | None, depth: int, origin: str
) -> None:
    config = EngineConfig(model="", overlap_depth=wish)
    model = open_checkpoint("", weights=False).config
    found = plan(load_hardware(profile), model, config)
    assert (found.overlap_depth, found.origins["overlap_depth"]) == (depth, origin)
    assert found.to_json()["overlap_depth"] == depth
