"""What a streamed chunk may cost: issue 6 allows 0.3 ms of CPU over worker, gateway and HTTP."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "chunk_cost.py"
LIMIT_MS = 0.3
FIRST_LIMIT_MS = 15.0


@pytest.mark.slow
def test_a_chunk_costs_little_cpu_and_leaves_soon_after_its_step() -> None:
    command = [sys.executable, str(SCRIPT), "--seconds", "4", "--idle", "2", "--repeats", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    costs = [float(found) for found in re.findall(r"([\d.]+) ms of CPU a chunk", done.stdout)]
    assert len(costs) == 3
    assert min(costs) <= LIMIT_MS, done.stdout
    first = re.search(r"median ([\d.]+)", done.stdout)
    assert first is not None and float(first[1]) <= FIRST_LIMIT_MS, done.stdout
