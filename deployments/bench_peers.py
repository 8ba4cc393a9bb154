"""Other engines that `polypath bench engine --vs` runs in turn, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ..runtime.bench import Measurement, Workload
from ..runtime.checkpoint.source import default_model
from ..runtime.errors import ConfigurationError

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
TIMEOUT_S = 900.0


class Peer:
    """One adapter in benchmarks/; `run` starts it, waits for it and keeps what it measured."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._adapter = FOLDER / f"{name}_peer.py"
        self._runs: list[list[Measurement]] = []
        if not self._adapter.is_file():
            known = sorted(p.stem.removesuffix("_peer") for p in FOLDER.glob("*_peer.py"))
            raise ConfigurationError(
                f"no peer is called {name!r}; this checkout has {', '.join(known) or 'none'}"
                " (peers come with the sources, in benchmarks/)"
            )

    def run(self, model: str, threads: int, workloads: Sequence[Workload], repeats: int) -> None:
        """One round of all workloads. ConfigurationError when the adapter fails, with its last
        line.
        """
        task = {
            "model": model or default_model(),
            "threads": threads,
            "repeats": repeats,
            "workloads": [asdict(w) for w in workloads],
        }
        done = subprocess.run(
            [sys.executable, str(self._adapter)],
            input=json.dumps(task) + "\n",
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or ["it printed nothing"]
            raise ConfigurationError(f"the peer {self.name} failed: {lines[-1]}")
        self._keep(workloads, json.loads(done.stdout.strip().splitlines()[-1]))

    def _keep(self, workloads: Sequence[Workload], rounds: list[list[dict[str, float]]]) -> None:
        if not self._runs:
            self._runs = [[] for _ in workloads]
        for workload, into, runs in zip(workloads, self._runs, rounds, strict=True):
            into += [
                Measurement(workload=workload, step_ms=0.0, host_ms=0.0, steps={}, **run)
                for run in runs
            ]

    def measurements(self) -> list[list[Measurement]]:
        """For each workload, all runs of all rounds."""
        return self._runs
