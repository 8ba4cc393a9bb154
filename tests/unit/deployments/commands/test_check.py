"""`polypath check` as people and scripts call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polypath.deployments.cli import app
from polypath.runtime.attention.torch_sdpa import TorchSdpaBackend

PLAIN = ("--attention-backend", "torch_sdpa", "--ops", "torch", "--linear-method", "dense")


def test_one_line_a_path(random_llama: Path) -> None:
    done = CliRunner().invoke(app, ["check", str(random_llama), *PLAIN])
    assert done.exit_code == 0, done.output
    assert "passed   auto: eager+torch_sdpa+torch, weights dense; error at most" in done.output


def test_json_and_exit_code_when_a_path_fails(
    random_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: object, batch: object) -> None:
        raise RuntimeError("planted fault")

    monkeypatch.setattr(TorchSdpaBackend, "plan", fail)
    done = CliRunner().invoke(app, ["check", str(random_llama), *PLAIN, "--json"])
    assert done.exit_code == 1 and "1 of" in done.stderr
    (first, *_) = json.loads(done.stdout)
    assert first["problem"] == "planted fault" and first["passed"] is False


def test_what_cannot_be_planned_is_said(random_llama: Path) -> None:
    done = CliRunner().invoke(app, ["check", str(random_llama), "--ops", "triton"])
    assert done.exit_code == 2 and "triton" in done.stderr
