"""`make gpu` without a GPU: it says so; its ways are gone through, tiny, on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from polypath.runtime.errors import PlanError
from polypath.runtime.forward_batch import ForwardBatch

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "benchmarks" / "gpu_report.py"


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_ends_with_3(capsys: pytest.CaptureFixture[str]) -> None:
    import gpu_report

    assert gpu_report.main([]) == 3
    assert "no GPU here" in capsys.readouterr().out


def test_a_dry_run_of_the_kernels_finds_no_fault_and_writes_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import gpu_report

    found, tables = tmp_path / "found.json", tmp_path / "found.md"
    only = ("--only", "kernels", "attention", "ceilings", "attention ms", "ops ms")
    written = ("--json", str(found), "--markdown", str(tables))
    assert gpu_report.main(["--dry-run", *only, *written]) == 0
    report = json.loads(found.read_text())
    assert set(report["sections"]) == set(only[1:])
    assert all(row["passed"] for row in report["sections"]["kernels"])
    assert "torch_sdpa float32" in {row["name"] for row in report["sections"]["attention"]}
    shares = [row["share"] for row in report["sections"]["attention ms"]]
    assert shares and all(share > 0 for share in shares)
    assert "| torch.norm float32 | ok |" in tables.read_text()
    assert "0 problems" in capsys.readouterr().out


def test_a_wrong_kernel_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_checks
    import gpu_figures
    import gpu_report

    from polypath.runtime.ops.torch import TorchOps

    class Wrong(TorchOps):
        def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
            return super().silu_mul(gate_up) * 1.001

    monkeypatch.setattr(gpu_checks, "tables", lambda context: [Wrong()])
    report = gpu_report.Report("", "")
    context = gpu_figures.attention_context("tiny", torch.device("cpu"))
    report.add("kernels", gpu_checks.check_ops(context), float("inf"))
    assert [problem.split()[1] for problem in report.problems] == ["torch.silu_mul"]


class Rows:
    """An attention backend whose rows are blind to their neighbours, or see how many there are."""

    name = "triton"

    def __init__(self, *, sees_neighbours: bool = False) -> None:
        self._sees_neighbours = sees_neighbours

    def plan(self, batch: ForwardBatch) -> None:
        self._batch = batch

    def attend(self, q_TND: torch.Tensor, kv_layer: torch.Tensor, layer: int) -> torch.Tensor:
        batch, out = self._batch, q_TND.clone()
        for i, length in enumerate(batch.kv_lens):
            first = kv_layer[int(batch.page_table[i, 0]), 0, 0, 0, 0]
            out[batch.query_starts[i] : batch.query_starts[i + 1]] *= first + length
        return out + batch.num_rows if self._sees_neighbours else out


@pytest.mark.parametrize("sees_neighbours", [False, True])
def test_rows_that_see_their_neighbours_are_found(
    monkeypatch: pytest.MonkeyPatch, sees_neighbours: bool
) -> None:
    import gpu_checks
    import gpu_figures

    backend = Rows(sees_neighbours=sees_neighbours)
    monkeypatch.setattr(gpu_checks, "backends", lambda context: [("triton", backend)])
    context = gpu_figures.attention_context("tiny", torch.device("cpu"))
    found = {check.name: check for check in gpu_checks.check_invariance(context)}
    of_rows = [check for name, check in found.items() if name.startswith("triton")]
    assert len(of_rows) == 5
    assert {check.passed for check in of_rows} == {not sees_neighbours}
    assert found["triton decode among 256"].note == (
        "rows [0, 1, 255] change" if sees_neighbours else ""
    )
    assert found["ops torch"].passed


def test_an_argmax_that_is_off_by_one_is_wrong() -> None:
    import gpu_checks

    assert gpu_checks._error(torch.tensor([5, 900]), torch.tensor([5, 901])) == float("inf")
    assert gpu_checks._error(torch.tensor([5, 901]), torch.tensor([5, 901])) == 0.0


def test_targets_are_judged_on_the_card_that_they_are_for() -> None:
    from gpu_targets import TARGETS, verdicts

    def figure(name: str, milliseconds: float | None, share: float | None) -> dict[str, object]:
        return {"name": name, "milliseconds": milliseconds, "share": share}

    sections = {
        "attention ms": [
            figure("triton decode, 32 x 1024", 0.1, 0.8),
            figure("torch_sdpa decode, 32 x 1024", 0.4, 0.1),
            figure("triton decode, 64 x 1024", 0.1, 0.7),
        ],
        "engine ms": [
            figure("llama-3.1-8b: engine step, 1 x 1024", 4.5, None),
            figure("llama-3.1-8b: engine step, 8 x 1024", None, None),
        ],
        "kernels": [{"name": "x", "passed": True, "value": None, "note": ""}],
    }
    found = {v.name: v for v in verdicts(sections, "NVIDIA H200")}
    assert len(found) == len(TARGETS)
    assert [v.verdict for v in found.values()][:4] == ["met", "missed", "met", "not measured"]
    assert found["decode, 32 x 1024"].found == "80%"
    assert found["llama-3.1-8b: engine step, 1 x 1024"].wanted == "<= 4.6 ms"
    elsewhere = {v.verdict for v in verdicts(sections, "Tesla T4")}
    assert elsewhere == {"not judged: this is no H200", "not measured"}


def test_a_model_that_the_card_has_no_room_for_is_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import gpu_figures
    import gpu_report

    def refuse(*args: object, **options: object) -> None:
        raise PlanError("it does not fit", refusals=())

    monkeypatch.setattr(gpu_figures, "start", refuse)
    cpu = torch.device("cpu")
    rows = gpu_figures.engine_figures("tiny", cpu, (1,), context_len=8, steps=4)
    report = gpu_report.Report("", "")
    report.add("engine ms", rows, float("inf"))
    assert report.problems == []
    (row,) = report.sections["engine ms"]
    assert row["note"] == "not here: it does not fit"
    assert "| tiny: engine | - |" in gpu_report.markdown(report)


def test_tests_of_the_card_end_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_report

    given: list[float] = []

    def too_slow(command: list[str], *, timeout: float, **options: object) -> None:
        given.append(timeout)
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", too_slow)
    problems: list[str] = []
    gpu_report.run_tests(problems, ROOT, 42.0)
    assert given == [42.0] and problems == ["tests/gpu: cut short, the time was up"]


def test_a_section_that_breaks_or_comes_too_late_does_not_cost_the_others() -> None:
    import gpu_report

    report = gpu_report.Report("", "")

    def breaks() -> Iterator[object]:
        yield from ()
        raise RuntimeError("planted")

    report.add("first", breaks(), float("inf"))
    report.add("second", [], 0.0)
    assert report.problems == ["first: RuntimeError: planted", "second: left out, the time was up"]


def test_lines_and_cells_say_what_a_row_holds() -> None:
    import gpu_report

    check = {"name": "x", "passed": False, "value": 0.5, "note": "why"}
    assert gpu_report.line("kernels", check).split() == ["FAILED", "kernels", "x", "5.0e-01", "why"]
    figure = {
        **{"name": "y", "milliseconds": 1.5, "rate": 3.2e12, "unit": "B/s", "share": 0.75},
        **{"replay_ms": 1.25, "note": ""},
    }
    assert gpu_report.line("ms", figure).endswith("3.20 TB/s   75% graph alone 1.250 ms")
    report = gpu_report.Report("card", "torch", sections={"ms": [figure], "kernels": [check]})
    report.problems.append("kernels: x why")
    text = gpu_report.markdown(report)
    assert "| y | 1.500 | 3.20 TB/s | 75% | 1.250 |  |" in text
    assert "| x | FAILED | 5.0e-01 | why |" in text and "- kernels: x why" in text


def test_it_links_the_checkout_where_polypath_is_not_installed(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path[:] = [p for p in sys.path if 'polypath' not in p]\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n"
        f"sys.path.insert(0, {str(ROOT / 'benchmarks')!r})\n"
        "import importlib.util, gpu_report\n"
        "assert importlib.util.find_spec('polypath') is None\n"
        "with gpu_report.linked():\n"
        "    from polypath.runtime.counters import Counters\n"
        "assert 'polypath' not in ''.join(sys.path[:1])\n"
        "print(Counters().to_json()['step_failures_total'])\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr


def test_random_checkpoints_have_the_shapes_that_their_config_says() -> None:
    import random_checkpoint

    checkpoint = random_checkpoint.RandomCheckpoint("tiny", torch.device("cpu"))
    assert not checkpoint.has("model.layers.0.self_attn.q_proj.bias")
    assert checkpoint.read("model.layers.1.mlp.down_proj.weight").shape == (128, 256)
    assert checkpoint.read("model.layers.1.input_layernorm.weight").tolist() == [1.0] * 128
    assert random_checkpoint.SHAPES["qwen3-0.6b"].qk_norm
    billions = random_checkpoint.SHAPES["llama-3.1-8b"].num_parameters / 1e9
    assert 7.4 < billions < 7.6  # the head is the embedding


@pytest.mark.slow
def test_a_whole_dry_run_finds_no_problem(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    command = [sys.executable, str(SCRIPT), "--dry-run", "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(found.read_text())
    planted = [r["name"] for r in report["sections"]["graphs"] if r["name"].startswith("planted")]
    assert len(planted) == 4
    steps = [r for r in report["sections"]["engine ms"] if "engine step" in r["name"]]
    assert len(steps) == 2 and all(r["milliseconds"] > 0 for r in steps)
    assert any("capture of all decode graphs" in r["name"] for r in report["sections"]["engine ms"])
    assert {r["verdict"] for r in report["sections"]["targets"]} == {"not measured"}
