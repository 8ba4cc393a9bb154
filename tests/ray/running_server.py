"""A `polypath serve` in a process of its own, as a user starts it, watched by tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

START_LIMIT_S = 120.0
STOP_LIMIT_S = 20.0
READY = re.compile(r"Ready after ([\d.]+) s: (https?://\S+)/v1")
POLYPATH = str(Path(sys.executable).with_name("polypath"))

# MAKEFLAGS: what `make test ARGS=...` was given is not for the `make serve` of a test
NOT_INHERITED = {"RAY_ADDRESS", "MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "ARGS"}


def inherited() -> dict[str, str]:
    """The environment of a test's processes."""
    return {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}


class RunningServer:
    """Its URL, what it printed so far, and its processes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self.url = ""
        self.ready_s = 0.0
        self.family: list[psutil.Process] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_ready(self, limit_s: float = START_LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            found = READY.search(self.output)
            if found:
                self.ready_s, self.url = float(found[1]), found[2]
                return
            assert self.process.poll() is None, f"it ended:\n{self.output}"
            time.sleep(0.05)
        raise AssertionError(f"not ready after {limit_s:.0f} s:\n{self.output}")

    def look(self) -> list[psutil.Process]:
        """Everything that runs under it now."""
        self.family = psutil.Process(self.process.pid).children(recursive=True)
        return self.family

    def get(self, path: str) -> Any:  # JSON
        # verify=False: without it each call reads all certificates of the system, 30 ms of CPU
        return httpx.get(self.url + path, timeout=30, trust_env=False, verify=False).json()

    def worker(self) -> dict[str, Any]:  # JSON
        """The one worker, as /v1/paths shows it."""
        (worker,) = self.get("/v1/paths")["data"]
        return worker

    def wait_until_idle(self, limit_s: float = 5.0) -> dict[str, Any]:  # JSON
        """The worker's stats once nothing runs, waits or holds pages."""
        deadline = time.monotonic() + limit_s
        while True:
            stats = self.worker()["stats"]
            if not (stats["running"] or stats["waiting"] or stats["kv_pages_used"]):
                return stats
            assert time.monotonic() < deadline, f"still busy after {limit_s} s: {stats}"
            time.sleep(0.05)

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """Signal it as a terminal does and wait; the exit code."""
        if self.process.poll() is None:
            self.look()
            self.process.send_signal(number)
        code = self.process.wait(STOP_LIMIT_S)
        self.join()
        return code

    def stop_group(self, number: signal.Signals) -> None:
        """Signal its whole process group, as a terminal's Ctrl-C does, and wait."""
        if self.process.poll() is None:
            self.look()
            os.killpg(self.process.pid, number)
            self.process.wait(STOP_LIMIT_S)
        self.join()

    def join(self) -> None:
        """Until all it printed was read; its end of the pipe is closed by its last process."""
        self._reader.join(5)

    def left_over(self, grace_s: float = 3.0) -> list[str]:
        """Names of its processes that still run after `grace_s` seconds."""
        _, alive = psutil.wait_procs(self.family, timeout=grace_s)
        return [f"{p.pid} {p.name()}" for p in alive if p.status() != psutil.STATUS_ZOMBIE]

    def _read(self) -> None:
        assert self.process.stdout is not None, "start() makes a pipe"
        with self.process.stdout:
            self.lines.extend(self.process.stdout)


@contextmanager
def serving(arguments: Sequence[str], **environment: str) -> Iterator[RunningServer]:
    """`polypath serve ...` until ready, and stopped afterwards whatever happens."""
    with serving_within(START_LIMIT_S, arguments, environment) as server:
        yield server


@contextmanager
def serving_within(
    limit_s: float,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    program: Sequence[str] = (POLYPATH,),
) -> Iterator[RunningServer]:
    """The same for starts that take longer: several workers, several nodes."""
    server = RunningServer(start(["serve", *arguments], program=program, **environment))
    try:
        server.wait_ready(limit_s)
        yield server
    finally:
        if server.process.poll() is None:
            server.look()
            server.process.send_signal(signal.SIGINT)
            try:
                server.process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                for process in [*server.family, server.process]:
                    process.kill()
        server.join()


def start(
    arguments: Sequence[str],
    *,
    program: Sequence[str] = (POLYPATH,),
    **environment: str,
) -> subprocess.Popen[str]:
    """The command in a session of its own, so that signals to the tests do not reach it."""
    env = inherited() | environment
    return subprocess.Popen(
        [*program, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        start_new_session=True,
    )


def run(arguments: Sequence[str], timeout_s: float = 60, **environment: str) -> tuple[int, str]:
    """Run a command to its end: exit code and output."""
    process = start(arguments, **environment)
    output, _ = process.communicate(timeout=timeout_s)
    return process.returncode, output
