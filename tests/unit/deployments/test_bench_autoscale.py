"""`polypath bench autoscale` on the committed traces, which their script still writes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polypath.benchmarks.arrival_traces import TRACES, trace
from polypath.deployments.autoscaling_pools import ScalingRules
from polypath.deployments.bench_autoscale import (
    DEFAULT,
    OURS,
    SAME_WAIT,
    contest,
    read_pools,
    read_trace,
)
from polypath.deployments.cli import app
from polypath.runtime.errors import ConfigurationError

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "traces"


@pytest.mark.parametrize("name", list(TRACES))
def test_the_script_writes_the_committed_traces(name: str) -> None:
    assert trace(TRACES[name], name) == (FOLDER / f"{name}.csv").read_text()


def short(path: Path, folder: Path, lines: int = 500) -> Path:
    found = folder / path.name
    found.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))
    return found


def test_prints_figures_and_writes_a_plot(tmp_path: Path) -> None:
    file = short(FOLDER / "bursty.csv", tmp_path)
    arguments = ["bench", "autoscale", str(file), "--pools", str(FOLDER / "pools.yaml")]
    found = CliRunner().invoke(app, [*arguments, "--plot", str(tmp_path)])
    assert found.exit_code == 0, found.output
    assert re.search(r"polypath saves -?\d+% of the cost", found.output.replace("\n", " "))
    svg = (tmp_path / "bursty.svg").read_text()
    assert svg.startswith("<svg") and svg.rstrip().endswith("</svg>") and "nan" not in svg


def test_prints_json_alone(tmp_path: Path) -> None:
    file = short(FOLDER / "constant.csv", tmp_path, 200)
    arguments = ["bench", "autoscale", str(file), "--pools", str(FOLDER / "pools.yaml"), "--json"]
    (said,) = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert said["arrivals"] == 199 and set(said["policies"]) == {OURS, DEFAULT}
    assert said["policies"][OURS]["cost"] > 0


@pytest.mark.parametrize("text", ["", "time_s,num_prompt\n1,2\n", "time_s,num_prompt,num_new\n"])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "t.csv"
    file.write_text(text)
    with pytest.raises(ConfigurationError):
        read_trace(file)


def test_what_are_no_pools_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("- {name: a}")
    with pytest.raises(ConfigurationError, match="no list of simulated pools"):
        read_pools(file)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(TRACES))
def test_ours_is_much_cheaper_than_serves_defaults_and_no_slower(name: str) -> None:
    pools = read_pools(FOLDER / "pools.yaml")
    found = contest(name, read_trace(FOLDER / f"{name}.csv"), pools, ScalingRules())
    assert found.saving(DEFAULT) >= 0.30
    assert found.speedup(DEFAULT) >= 0.95
    assert SAME_WAIT not in found.outcomes
