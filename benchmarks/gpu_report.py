"""`make gpu`: what holds and how fast it is on a card, in at most eight minutes.

Needs torch and triton; no Ray, no install, no network: the checkout is linked as `polypath` in a
temporary folder on the path. `--dry-run` goes the same ways on a CPU, tiny, and its figures mean
nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUDGET_S = 480  # of the whole run, tests/gpu included
TESTS_S = 60  # kept back for tests/gpu
logger = logging.getLogger("gpu_report")


@dataclass(slots=True)
class Report:
    """Everything that was found, in the order in which it was."""

    device: str
    software: str
    seconds: float = 0.0
    sections: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, section: str, rows: Iterable[Any], until: float) -> None:
        """Run one section; what it raises is a problem of that section, not the end of the rest."""
        found = self.sections.setdefault(section, [])
        if time.monotonic() > until:
            self.problems.append(f"{section}: left out, the time was up")
            return
        try:
            for row in rows:
                found.append(asdict(row))
                print(line(section, found[-1]), flush=True)
                if found[-1].get("passed") is False:
                    self.problems.append(f"{section}: {found[-1]['name']} {found[-1]['note']}")
                if time.monotonic() > until:
                    self.problems.append(f"{section}: cut short, the time was up")
                    return
        except Exception as error:  # the edge: a section that breaks must not cost the others
            logger.exception("%s broke", section)
            self.problems.append(f"{section}: {type(error).__name__}: {error}"[:300])


def line(section: str, row: dict[str, Any]) -> str:
    """One row as text."""
    if "wanted" in row:
        return f"       {section:12} {row['name']:44} {' '.join(_verdict_cells(row)[1:])}".rstrip()
    if "passed" in row:
        verdict = "ok    " if row["passed"] else "FAILED"
        value = "" if row["value"] is None else f"{row['value']:9.1e}"
        return f"{verdict} {section:12} {row['name']:44} {value:>9} {row['note']}".rstrip()
    rate = "" if row["rate"] is None else f"{scaled(row['rate'])}{row['unit']}"
    share = "" if row["share"] is None else f"{row['share']:5.0%}"
    replay = "" if row["replay_ms"] is None else f"graph alone {row['replay_ms']:.3f} ms"
    text = f"{_milliseconds(row):>9} ms {rate:>14} {share:>5} {replay} {row['note']}"
    return f"       {section:12} {row['name']:44} {text}".rstrip()


def scaled(value: float) -> str:
    """Such as "3.21 T"."""
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= factor:
            return f"{value / factor:.2f} {prefix}"
    return f"{value:.2f} "


def markdown(report: Report) -> str:
    """The tables that are committed under docs/."""
    parts = [f"{report.device}; {report.software}; {report.seconds:.0f} s\n"]
    for section, rows in report.sections.items():
        if not rows:
            continue
        if "wanted" in rows[0]:
            head = ["target", "wanted", "found", "verdict"]
            body = [_verdict_cells(row) for row in rows]
        elif "passed" in rows[0]:
            head = ["check", "verdict", "error", "note"]
            body = [_check_cells(row) for row in rows]
        else:
            head = ["what", "median ms", "rate", "of the ceiling", "graph alone ms", "note"]
            body = [_figure_cells(row) for row in rows]
        lines = [head, ["---"] * len(head), *body]
        parts.append(f"## {section}\n\n" + "\n".join(f"| {' | '.join(x)} |" for x in lines) + "\n")
    if report.problems:
        parts.append("## problems\n\n" + "\n".join(f"- {p}" for p in report.problems) + "\n")
    return "\n".join(parts)


def _check_cells(row: dict[str, Any]) -> list[str]:
    value = "" if row["value"] is None else f"{row['value']:.1e}"
    return [row["name"], "ok" if row["passed"] else "FAILED", value, row["note"]]


def _verdict_cells(row: dict[str, Any]) -> list[str]:
    return [row["name"], row["wanted"], row["found"], row["verdict"]]


def _milliseconds(row: dict[str, Any]) -> str:
    return "-" if row["milliseconds"] is None else f"{row['milliseconds']:.3f}"


def _figure_cells(row: dict[str, Any]) -> list[str]:
    rate = "" if row["rate"] is None else f"{scaled(row['rate'])}{row['unit']}"
    share = "" if row["share"] is None else f"{row['share']:.0%}"
    replay = "" if row["replay_ms"] is None else f"{row['replay_ms']:.3f}"
    return [row["name"], _milliseconds(row), rate, share, replay, row["note"]]


@contextmanager
def linked() -> Iterator[Path]:
    """The checkout as `polypath`, in a temporary folder at the front of the path."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "polypath").symlink_to(ROOT, target_is_directory=True)
        before = sys.path[:]
        sys.path[:0] = [folder, str(ROOT / "benchmarks")]
        try:
            yield Path(folder)
        finally:
            sys.path[:] = before


def sections(dry: bool) -> Iterator[tuple[str, Callable[[], Iterable[Any]]]]:
    """Name and rows of each; checks first, since figures of a wrong kernel are worth nothing, but
    whole paths last, since packages that compile their kernels at first use take minutes there.
    """
    import gpu_checks as checks
    import gpu_figures as figures
    import gpu_graph_checks as graphs
    import torch

    device = torch.device("cpu" if dry else "cuda")
    context = figures.attention_context("tiny" if dry else "llama-3.1-8b", device)
    small = figures.attention_context("tiny", device)
    ceilings, measured = figures.measure_ceilings(device, small=dry)
    yield "kernels", lambda: checks.check_ops(small)
    yield "attention", lambda: checks.check_attention(small)
    if not dry:
        yield "heads", lambda: checks.check_heads(device)
    yield "invariance", lambda: checks.check_invariance(context)
    yield "graphs", lambda: graphs.check_graphs(device.type)
    yield "ceilings", lambda: measured
    yield "attention ms", lambda: figures.attention_figures(context, ceilings, small=dry)
    yield "ops ms", lambda: figures.ops_figures(context, ceilings, small=dry)
    shapes = ("tiny",) if dry else ("qwen3-0.6b", "llama-3.1-8b")
    sizes = (1, 2) if dry else (1, 8, 64)
    length, steps = (32, 8) if dry else (1024, 48)
    for name in shapes:
        yield (
            "engine ms",
            lambda name=name: figures.engine_figures(
                name, device, sizes, context_len=length, steps=steps
            ),
        )
    yield "paths", lambda: graphs.check_paths(device.type)


def add_targets(report: Report, only: Sequence[str] | None) -> None:
    """What was found beside what is wanted of an H200."""
    from gpu_targets import verdicts

    if not only or "targets" in only:
        report.add("targets", verdicts(report.sections, report.device), float("inf"))


def run_tests(problems: list[str], link: Path, seconds: float) -> None:
    """tests/gpu, where pytest is installed, for at most so many seconds."""
    if importlib.util.find_spec("pytest") is None:
        print("pytest is not installed here: tests/gpu are left out", flush=True)
        return
    command = [sys.executable, "-m", "pytest", str(ROOT / "tests" / "gpu"), "-q"]
    path = os.pathsep.join(filter(None, (str(link), os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path},
            timeout=max(1.0, seconds),
        )
    except subprocess.TimeoutExpired:
        problems.append("tests/gpu: cut short, the time was up")
        return
    if done.returncode not in (0, 5):  # 5: there is none
        problems.append(f"tests/gpu: pytest ended with {done.returncode}")


def describe() -> tuple[str, str]:
    """The device and the software."""
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    triton = importlib.util.find_spec("triton") is not None
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    if triton:
        import triton as found  # pyright: ignore[reportMissingImports]

        versions += f", triton {found.__version__}"
    return name or platform.machine(), versions


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What was asked."""
    parser = argparse.ArgumentParser(description="Checks and figures of a card.")
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    parser.add_argument("--seconds", type=float, default=BUDGET_S, help="after these, no more")
    parser.add_argument("--only", nargs="*", help="sections, by name")
    parser.add_argument("--no-tests", action="store_true", help="leave tests/gpu out")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU; no figure counts")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """0: all holds; 1: something does not; 3: there is no GPU. A target that is missed is a figure
    and no fault.
    """
    asked = arguments(argv)
    import torch

    if not asked.dry_run and not torch.cuda.is_available():
        print("no GPU here: `make gpu` needs one; `--dry-run` goes the same ways on a CPU")
        return 3
    start = time.monotonic()
    report = Report(*describe())
    has_tests = not asked.no_tests and not asked.dry_run
    until = start + asked.seconds - (TESTS_S if has_tests else 0)
    with linked() as link:
        for name, rows in sections(asked.dry_run):
            if not asked.only or name in asked.only:
                report.add(name, rows(), until)
        add_targets(report, asked.only)
        if has_tests:
            torch.cuda.empty_cache()
            run_tests(report.problems, link, start + asked.seconds - time.monotonic())
    report.seconds = time.monotonic() - start
    if asked.json:
        asked.json.write_text(json.dumps(asdict(report), indent=1))
    if asked.markdown:
        asked.markdown.write_text(markdown(report))
    for problem in report.problems:
        print(f"problem: {problem}")
    print(f"{report.seconds:.0f} s; {len(report.problems)} problems")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
