"""Processes that keep cores busy beside a measurement, started and ended by the bench itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..runtime.errors import ConfigurationError

# Looks for its parent now and then, so that it never outlives a bench that was killed.
LOOP = """
import os, sys
parent, core = int(sys.argv[1]), int(sys.argv[2])
os.sched_setaffinity(0, {core})
print("busy", flush=True)
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def busy_cores(count: int) -> Iterator[list[int]]:
    """`count` Python loops, each pinned to a core of its own, until the block is left; their
    process ids. ConfigurationError when this process may use fewer cores.
    """
    check_busy(count)
    cores = sorted(os.sched_getaffinity(0))
    processes = [_start(core) for core in cores[:count]]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "busy\n"
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def check_busy(count: int) -> None:
    """ConfigurationError when this process may not use that many cores."""
    usable = len(os.sched_getaffinity(0))
    if not 0 <= count <= usable:
        raise ConfigurationError(
            f"--busy {count}: each busy process takes a core of its own, and {usable} can be used "
            f"here; give 0 to {usable}"
        )


def _start(core: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", LOOP, str(os.getpid()), str(core)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
