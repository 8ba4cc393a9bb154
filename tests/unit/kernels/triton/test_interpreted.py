"""Runs the tests of `interpreted/` in a process whose Triton interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"


def run(marks: str, timeout_s: float) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks]
    done = subprocess.run(
        [*command, str(FOLDER)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_kernels_and_backend_equal_their_torch_twins_in_the_interpreter() -> None:
    run("not slow", 400)


@pytest.mark.slow
def test_and_so_they_do_over_a_wide_sweep_of_shapes() -> None:
    run("slow", 1200)
