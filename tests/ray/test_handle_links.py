"""The handle link is the road's twin: the same checks, on each replica by itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from polypath.tests.link_checks import CHECKS, name_of

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_each_replica_is_reached_and_passes_every_check(no_server: None, tiny_model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "polypath.tests.ray.handle_links", str(tiny_model)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    said = [line.split() for line in done.stdout.splitlines()]
    workers = {line[1]: line[2] for line in said if line[:1] == ["who"]}
    assert len(workers) == 2 and len(set(workers.values())) == 2
    assert {line[1] for line in said if line[:1] == ["secret"]} == set(workers)
    held = {(line[1], line[2]) for line in said if line[:1] == ["held"]}
    assert held == {(name_of(check), replica) for check in CHECKS for replica in workers}
