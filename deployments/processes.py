"""The processes that this one started, so that all of them, and no other, can be ended."""

from __future__ import annotations

from pathlib import Path

import psutil


class Family:
    """Descendants seen so far. Ray's workers lose their parent when the raylet ends, so look
    before, not after.
    """

    def __init__(self) -> None:
        self._me = psutil.Process()
        self._seen: dict[int, psutil.Process] = {}
        self._programs: dict[int, str] = {}  # their files' names, by process id

    def look(self) -> None:
        """Remember the descendants of this moment."""
        for process in self._me.children(recursive=True):
            if self._seen.get(process.pid) != process:
                self._seen[process.pid] = process
                self._programs[process.pid] = _program(process)

    def has_lost(self, program: str) -> bool:
        """Whether one that runs this program was seen, and none of them runs any more."""
        found = [each for each in self._seen.values() if self._programs[each.pid] == program]
        return bool(found) and not any(_runs(process) for process in found)

    def wait_or_kill(self, grace_s: float) -> list[int]:
        """Give what was seen `grace_s` seconds to end, then kill it. Returns the ids that had to be
        killed.
        """
        _, alive = psutil.wait_procs(self._living(), timeout=grace_s)
        return self._kill(alive)

    def kill(self) -> list[int]:
        """Kill what was seen and still runs, at once."""
        self.look()
        return self._kill(self._living())

    def _living(self) -> list[psutil.Process]:
        # is_running() compares start times, so an id that was given to a stranger since is not
        # taken for ours.
        return [p for p in self._seen.values() if p.is_running()]

    def _kill(self, processes: list[psutil.Process]) -> list[int]:
        killed: list[int] = []
        for process in processes:
            try:
                if process.status() != psutil.STATUS_ZOMBIE:
                    process.kill()
                    killed.append(process.pid)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(processes, timeout=2)
        return killed


def _program(process: psutil.Process) -> str:
    try:
        return Path(process.cmdline()[0]).name
    except (psutil.Error, IndexError):
        return ""  # it has ended already


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
