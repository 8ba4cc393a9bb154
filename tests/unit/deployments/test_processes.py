"""Exactly the processes that were started are ended."""

from __future__ import annotations

import subprocess
import sys

import psutil

from polypath.deployments.processes import Family

SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]
PARENT = [
    sys.executable,
    "-c",
    f"import subprocess, time; p = subprocess.Popen({SLEEPER!r}); print(p.pid, flush=True); "
    "time.sleep(60)",
]


def test_a_grandchild_whose_parent_is_gone_is_still_ended() -> None:
    with subprocess.Popen(PARENT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        grandchild = int(parent.stdout.readline())
        family = Family()
        family.look()
        parent.kill()
        parent.wait()
        assert psutil.pid_exists(grandchild)
        assert grandchild in family.wait_or_kill(grace_s=0.1)
    assert not psutil.pid_exists(grandchild)


def test_what_ends_by_itself_is_not_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        family = Family()
        family.look()
        assert child.stdin is not None
        child.stdin.write(b"\n")
        child.stdin.close()
        child.wait()
        assert family.wait_or_kill(grace_s=2.0) == []
