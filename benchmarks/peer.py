"""What the adapters of peers share: the task on standard input, the answer on standard output, and
what a peer that is not installed says.

Task, one JSON line: {"model", "threads", "vocab", "first_seed", "repeats", "workloads": [{"batch",
"prompt_tokens", "new_tokens"}], "settings": null, or of each workload what the first round found}.
Answer, the last line: {"version", "settings": of each workload, "runs": of each workload [{
"prompt_tokens", "generated_tokens", "prefill_tokens_s", "decode_tokens_s"}]}.

Runs under the peer's own Python, so it imports the standard library only.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import random
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

Settings = dict[str, Any]  # Any: plain JSON
PR_SET_PDEATHSIG = 1  # of Linux


@dataclass(frozen=True)
class Workload:
    """`batch` prompts of `prompt_tokens` each, answered greedily with `new_tokens` each."""

    batch: int
    prompt_tokens: int
    new_tokens: int

    def prompts(self, vocab: int, seed: int) -> list[list[int]]:
        """The token ids that runtime/bench.py draws for this workload and seed."""
        rng = random.Random(f"{seed} {self.batch} {self.prompt_tokens}")
        return [
            [rng.randrange(vocab) for _ in range(self.prompt_tokens)] for _ in range(self.batch)
        ]


@dataclass(frozen=True)
class Run:
    """Counts and moments (seconds) of one run: what the peer itself says it did, and when."""

    prompt_tokens: int
    generated_tokens: int
    start: float
    first: float  # every row has its first token
    end: float
    after_first: int  # tokens drawn after `first`

    def to_json(self) -> dict[str, float]:
        """Rates as runtime/bench.py defines them."""
        rate = self.after_first / (self.end - self.first) if self.after_first else 0.0
        return {
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "prefill_tokens_s": self.prompt_tokens / (self.first - self.start),
            "decode_tokens_s": rate,
        }

    @property
    def seconds(self) -> float:
        """What tuning compares: the part that the workload is about."""
        return self.end - self.first if self.after_first else self.first - self.start


@dataclass(frozen=True)
class Task:
    """One round, as the bench asks for it."""

    model: str
    threads: int
    vocab: int
    first_seed: int
    repeats: int
    workloads: tuple[Workload, ...]
    settings: list[Settings] | None


Measure = Callable[[Workload, Settings, list[list[int]]], Run]


def read_task() -> Task:
    """From standard input. From now on this process ends with the bench, however that ends."""
    end_with_parent()
    values = json.loads(sys.stdin.readline())
    workloads = tuple(Workload(**workload) for workload in values.pop("workloads"))
    return Task(workloads=workloads, **values)


def end_with_parent() -> None:
    """Have the kernel end this process when the one that started it is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def need(package: str, how: str) -> ModuleType:
    """Import the peer's package, or end with how to install it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        fail(f"{package} does not load in {sys.executable} ({error}); {how}")


def fail(message: str) -> NoReturn:
    """End with one line that the bench shows."""
    raise SystemExit(" ".join(message.split()))


def answer(
    task: Task, version: str, choices: Callable[[Workload], Sequence[Settings]], measure: Measure
) -> None:
    """Run all workloads and print the answer. In the first round each workload is tried once with
    each of its `choices`, and the fastest is kept.
    """
    settings = task.settings or [_tune(task, w, choices(w), measure) for w in task.workloads]
    runs = [
        [
            measure(workload, chosen, workload.prompts(task.vocab, task.first_seed + i)).to_json()
            for i in range(task.repeats)
        ]
        for workload, chosen in zip(task.workloads, settings, strict=True)
    ]
    print(json.dumps({"version": version, "settings": settings, "runs": runs}))


def _tune(
    task: Task, workload: Workload, choices: Sequence[Settings], measure: Measure
) -> Settings:
    if len(choices) == 1:
        return choices[0]
    prompts = workload.prompts(task.vocab, -1)
    tries = [(measure(workload, choice, prompts).seconds, i) for i, choice in enumerate(choices)]
    return choices[min(tries)[1]]
