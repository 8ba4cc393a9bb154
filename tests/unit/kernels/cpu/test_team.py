"""The thread team where one of its threads is kept off its core."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[3] / "kernels" / "cpu"


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_stalled_thread_is_left_out_for_a_while(tmp_path: Path) -> None:
    program = tmp_path / "team_stall"
    sources = [str(HERE / "team_stall.cpp"), str(KERNELS / "team.cpp")]
    command = ["g++", "-std=c++17", "-O1", "-pthread", "-I", str(KERNELS), *sources, "-o"]
    subprocess.run([*command, str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "ok\n", done.stderr
