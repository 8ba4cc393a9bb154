"""`polypath bench engine` as people and scripts call it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from polypath.deployments.bench_options import variant_name
from polypath.deployments.cli import app
from polypath.runtime import ceilings
from polypath.runtime.planning.hardware import load_hardware
from polypath.runtime.planning.rules import native_variant
from polypath.tests import tiny_models

needs_native = pytest.mark.skipif(
    native_variant(load_hardware("this")) is None, reason="no build of the kernels fits this CPU"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_models.random(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "BUFFER_FLOATS", 1 << 20)
    monkeypatch.setattr(ceilings, "SHAPES", ((64, 64, 64),))


def call(*arguments: str) -> Any:  # Any: typer's Result, which it does not export
    return CliRunner().invoke(app, ["bench", "engine", *arguments], env={"COLUMNS": "200"})


@needs_native
def test_paths_given_twice_are_measured_in_turn(model: str) -> None:
    paths = ["--linear-method", "dense_native", "--linear-method", "int8", "--runner", "eager"]
    points = ["--batch", "2", "--context", "8", "--context", "12", "--prefill", "0"]
    counts = ["--new-tokens", "3", "--repeats", "2", "--rounds", "2", "--busy", "1"]
    done = call(model, *paths, *points, *counts, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert set(report["plans"]) == {"polypath dense_native", "polypath int8"}
    assert report["plans"]["polypath int8"]["linear_method"] == "int8"
    rows = report["rows"]
    assert len(rows) == 2 * 2 * 2  # paths, contexts, quiet and busy
    assert {row["runs"] for row in rows} == {4}
    assert all(row["decode_roofline"]["share"] > 0 for row in rows)
    assert all("decode eager planned" in row["median"]["steps"] for row in rows)
    assert report["ceilings"]["int8_gop_s"] > 0 and report["busy"] == 1


def test_the_table_names_machine_plan_and_steps(model: str) -> None:
    done = call(model, "--batch", "1", "--new-tokens", "2", "--prefill", "4", "--runner", "eager")
    assert done.exit_code == 0, done.output
    for part in ("prefill 4", "batch 1, 64 + 2", "GOP/s", "plan pp-", "decode eager planned"):
        assert part in done.stdout


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--batch", "0"], "--batch and --context must be at least 1"),
        (["--context", "0"], "--batch and --context must be at least 1"),
        (["--new-tokens", "1"], "--new-tokens at least 2"),
        (["--prefill", "-1"], "--prefill at least 1"),
        (["--repeats", "0"], "each must be at least 1"),
        (["--busy", "9999"], "give 0 to"),
        (["--vs", "nothing"], "no peer is called 'nothing'; this checkout has"),
        (["--vs", "llama.cpp", "--peer-python", "/nowhere"], "--peer-python /nowhere is no file"),
        (["--runner", "nothing"], "nothing"),
        (["--batch", "100", "--prefill", "8"], "raise --max-num-seqs or measure less"),
    ],
)
def test_what_cannot_be_measured_is_told_before_anything_runs(
    model: str, arguments: list[str], part: str
) -> None:
    done = call(model, *arguments)
    assert done.exit_code != 0
    assert part in " ".join((done.output + str(done.exception)).split())


def test_a_variant_is_named_by_what_sets_it_apart() -> None:
    one = {"runner": "eager", "ops": "torch"}
    two = {"runner": "cpu_graph", "ops": "torch"}
    assert variant_name(one, [one]) == "polypath"
    assert [variant_name(v, [one, two]) for v in (one, two)] == [
        "polypath eager",
        "polypath cpu_graph",
    ]
