"""`polypath bench quality` as people and scripts call it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from polypath.deployments.cli import app
from polypath.deployments.commands import bench_quality
from polypath.tests import tiny_models


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_models.random(folder)
    return str(folder)


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 4)
    return str(path)


def call(*arguments: str) -> Any:  # Any: typer's Result, which it does not export
    return CliRunner().invoke(app, ["bench", "quality", *arguments])


def test_float_weights_lose_nothing(model: str, text: str) -> None:
    options = ["--text", text, "--window", "64", "--prompts", "2", "--new-tokens", "4", "--json"]
    done = call(model, *options)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["ratio"] == pytest.approx(1.0, abs=1e-4) and found["share_held"] == 1.0
    assert found["plans"][1]["linear_method"] == "dense"
    assert found["num_scored"] > 100


def test_what_is_worse_ends_with_exit_code_1(
    model: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_quality, "MAX_RATIO", 0.5)
    done = call(model, "--text", text, "--window", "64", "--prompts", "1", "--new-tokens", "2")
    assert done.exit_code == 1
    assert "perplexity" in done.stdout and "100% of 1 continuations" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--window", "1"], "must be at least 2"),
        (["--prompts", "0"], "--prompts 1"),
        (["--text", "/nowhere.txt"], "/nowhere.txt cannot be read as text"),
        (["--window", "100000"], "tokens; --window 100000 needs more"),
    ],
)
def test_what_cannot_be_scored_is_told(
    model: str, text: str, arguments: list[str], part: str
) -> None:
    done = call(model, "--text", text, *arguments)
    assert done.exit_code not in (0, 1) or done.exception is not None
    assert part in " ".join((done.output + str(done.exception)).split())


def test_the_default_text_is_there() -> None:
    assert bench_quality.TEXT.stat().st_size > 20_000
