"""Exactly the processes that were started are ended."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

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


def test_a_program_that_has_ended_is_missed_once_it_was_seen(tmp_path: Path) -> None:
    program = tmp_path / "gcs_server"
    program.symlink_to("/bin/sleep")
    family = Family()
    family.look()
    assert not family.has_lost("gcs_server"), "it never ran"
    with subprocess.Popen([program, "60"]) as first, subprocess.Popen([program, "60"]) as second:
        family.look()
        first.kill()
        first.wait()
        assert not family.has_lost("gcs_server")
        second.kill()  # not waited for: a zombie runs no more
        while psutil.Process(second.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert family.has_lost("gcs_server") and not family.has_lost("raylet")


def test_what_ends_by_itself_is_not_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        family = Family()
        family.look()
        assert child.stdin is not None
        child.stdin.write(b"\n")
        child.stdin.close()
        child.wait()
        assert family.wait_or_kill(grace_s=2.0) == []
