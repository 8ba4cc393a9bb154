"""Hardware as JSON, and where it is loaded from."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from polypath.runtime.errors import ConfigurationError
from polypath.runtime.planning.hardware import (
    Hardware,
    NumaNode,
    load_hardware,
    profile_names,
)


@pytest.mark.parametrize("name", [*profile_names(), "this"])
def test_hardware_survives_json(name) -> None:
    hardware = load_hardware(name)
    assert Hardware.from_json(json.loads(json.dumps(hardware.to_json()))) == hardware


def test_profiles_state_the_software_they_assume() -> None:
    assert len(profile_names()) == 15
    for name in profile_names():
        hardware = load_hardware(name)
        assert hardware.origin == "profile" and hardware.software.startswith("assumes ")


@pytest.mark.parametrize(
    "numa",
    [
        None,
        (),
        (NumaNode(id=0, cpus=(0, 2), memory_bytes=1), NumaNode(id=1, cpus=(), memory_bytes=0)),
        (NumaNode(id=0, cpus=(0,), memory_bytes=None),),
    ],
    ids=["unknown", "no nodes", "no memory", "unreadable"],
)
def test_strange_topologies_load(avx2, tmp_path, numa) -> None:
    path = tmp_path / "node.json"
    path.write_text(json.dumps(replace(avx2, numa=numa).to_json()))
    assert load_hardware(str(path)).numa == numa


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"surprise": 1}, "unknown keys surprise"),
        ({"schema": 2}, "schema is 2"),
        ({"gpus": 3}, r"Hardware.gpus is 3; it must be a list"),
        ({"cpu": {"name": "x"}}, "Hardware.cpu lacks architecture"),
        ({"memory": {"total_bytes": "1", "free_bytes": 1, "origin": ""}}, "must be a int"),
        ({"origin": "guess"}, "'probe' or 'profile'"),
        ({"python": True}, "must be a str"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(avx2, tmp_path, change, message) -> None:
    path = tmp_path / "node.json"
    path.write_text(json.dumps(avx2.to_json() | change))
    with pytest.raises(ConfigurationError, match=message) as caught:
        load_hardware(str(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\xff"])
def test_a_file_that_is_no_hardware_is_an_error(tmp_path, text) -> None:
    path = tmp_path / "node.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigurationError, match=r"node\.json"):
        load_hardware(str(path))


def test_an_unknown_name_lists_the_profiles() -> None:
    with pytest.raises(ConfigurationError, match="avx2, b200, epyc-avx2, graviton, h100, h200"):
        load_hardware("h1000")
