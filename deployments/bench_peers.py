"""Other engines that `polypath bench engine --vs` runs in turn, each in a process of its own and
with its own Python.

Protocol: the adapter benchmarks/NAME_peer.py reads one JSON line and prints one (benchmarks/peer.py
has the other side).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..runtime.bench import Measurement, Workload
from ..runtime.checkpoint.source import default_model
from ..runtime.errors import ConfigurationError

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
TIMEOUT_S = 3600.0


class Peer:
    """One adapter in benchmarks/; `run` starts it, waits for it and keeps what it measured.

    `spec` is NAME, or NAME=MODEL where the peer needs the model in another form than ours.
    """

    def __init__(self, spec: str, *, python: str | None = None, folder: Path = FOLDER) -> None:
        name, _, model = spec.partition("=")
        self.name = f"{name} {Path(model).stem}" if model else name
        self.version = ""
        self.settings: list[dict[str, Any]] | None = None  # of each workload, once tuned
        self._model = model
        self._python = python or sys.executable
        self._adapter = folder / f"{name.replace('.', '')}_peer.py"
        self._runs: dict[bool, list[list[Measurement]]] = {}
        if not self._adapter.is_file():
            known = sorted(_name(path) for path in folder.glob("*_peer.py"))
            raise ConfigurationError(
                f"no peer is called {name!r}; this checkout has {', '.join(known) or 'none'}"
                " (peers come with the sources, in benchmarks/)"
            )
        if not Path(self._python).is_file():
            raise ConfigurationError(
                f"--peer-python {self._python} is no file; give the Python that the peer is "
                "installed into, such as peers/bin/python"
            )

    def run(
        self,
        model: str,
        threads: int,
        workloads: Sequence[Workload],
        repeats: int,
        *,
        vocab: int,
        first_seed: int = 0,
        is_busy: bool = False,
    ) -> None:
        """One round of all workloads. The first finds the best settings of each, later ones keep
        them. ConfigurationError when the adapter fails, with its last line, or did other work.
        """
        task = {
            "model": self._model or model or default_model(),
            "threads": threads,
            "vocab": vocab,
            "first_seed": first_seed,
            "repeats": repeats,
            "workloads": [asdict(w) for w in workloads],
            "settings": self.settings,
        }
        answer = self._ask(task)
        self.version, self.settings = answer["version"], answer["settings"]
        kept = self._runs.setdefault(is_busy, [[] for _ in workloads])
        for workload, into, runs in zip(workloads, kept, answer["runs"], strict=True):
            into += [self._measurement(workload, run) for run in runs]

    def measurements(self, *, is_busy: bool = False) -> list[list[Measurement]]:
        """For each workload, all runs of all rounds."""
        return self._runs.get(is_busy, [])

    def _ask(self, task: dict[str, Any]) -> dict[str, Any]:  # Any: plain JSON
        try:
            done = subprocess.run(
                [self._python, str(self._adapter)],
                input=json.dumps(task) + "\n",
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ConfigurationError(
                f"the peer {self.name} took more than {TIMEOUT_S:.0f} s; measure fewer points or "
                "repeats"
            ) from None
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or ["it printed nothing"]
            raise ConfigurationError(f"the peer {self.name} failed: {lines[-1]}")
        return json.loads(done.stdout.strip().splitlines()[-1])

    def _measurement(self, workload: Workload, run: dict[str, float]) -> Measurement:
        did = (int(run["prompt_tokens"]), int(run["generated_tokens"]))
        asked = tuple(workload.batch * n for n in (workload.prompt_tokens, workload.new_tokens))
        if did != asked:
            raise ConfigurationError(
                f"the peer {self.name} computed {did[0]} prompt tokens and {did[1]} new ones where "
                f"{asked[0]} and {asked[1]} were asked; its figures cannot be compared"
            )
        rate = run["decode_tokens_s"]
        return Measurement(
            workload=workload,
            prefill_tokens_s=run["prefill_tokens_s"],
            decode_tokens_s=rate,
            step_ms=1e3 * workload.batch / rate if rate else 0.0,
            forward_ms=0.0,
            host_ms=0.0,
            steps={},
        )


def peer_pythons(given: Sequence[str]) -> dict[str, str]:
    """From `--peer-python` values, PATH for all peers ("") or NAME=PATH for one."""
    pairs = [text.partition("=") for text in given]
    return {(name if path else ""): (path or name) for name, _, path in pairs}


def _name(adapter: Path) -> str:
    name = adapter.stem.removesuffix("_peer")
    return {"llamacpp": "llama.cpp"}.get(name, name)
