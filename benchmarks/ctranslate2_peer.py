"""Peer for `polypath bench engine --vs ctranslate2=FOLDER`: CTranslate2's generator in int8.

FOLDER holds the model in CTranslate2's form (convert.py makes it). Protocol: peer.py.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from peer import Run, Settings, Task, Workload, answer, fail, need, read_task

HOW = """install it into an environment of its own: python3 -m venv peers && peers/bin/pip install
ctranslate2, then give --peer-python peers/bin/python"""


class CTranslate2:
    """One generator for all workloads."""

    def __init__(self, task: Task) -> None:
        self._api: Any = need("ctranslate2", HOW)  # Any: a module without types here
        folder = Path(task.model)
        if not (folder / "model.bin").is_file():
            fail(
                f"{folder} has no model.bin; make it with benchmarks/convert.py (see "
                "benchmarks/README.md) and give --vs ctranslate2=FOLDER"
            )
        self._generator = self._api.Generator(
            str(folder), device="cpu", compute_type="int8", intra_threads=task.threads
        )
        self._tokens: list[str] = json.loads((folder / "vocabulary.json").read_text())

    @property
    def version(self) -> str:
        """Package and number type."""
        return f"ctranslate2 {self._api.__version__} ({self._generator.compute_type})"

    def measure(self, workload: Workload, settings: Settings, prompts: list[list[int]]) -> Run:
        """One call; its callback hears of every token."""
        counts = [0] * workload.batch
        at_first: list[tuple[float, int]] = []

        def heard(step: Any) -> bool:
            counts[step.batch_id] += 1
            if not at_first and all(counts):
                at_first.append((time.perf_counter(), sum(counts)))
            return False

        texts = [[self._tokens[i] for i in prompt] for prompt in prompts]
        start = time.perf_counter()
        results = self._generator.generate_batch(
            texts,
            beam_size=1,
            sampling_topk=1,
            max_length=workload.new_tokens,
            min_length=workload.new_tokens,
            include_prompt_in_result=False,
            callback=heard,
        )
        end = time.perf_counter()
        generated = sum(len(result.sequences_ids[0]) for result in results)
        if generated != sum(counts):
            fail(f"ctranslate2 told of {sum(counts)} tokens and gave {generated}")
        first, before = at_first[0]
        return Run(sum(map(len, prompts)), generated, start, first, end, generated - before)


def main() -> None:
    """Read the task, load, measure, print."""
    task = read_task()
    peer = CTranslate2(task)
    peer.measure(Workload(1, 16, 2), {}, [[5] * 16])  # first touches
    answer(task, peer.version, lambda workload: [{}], peer.measure)


if __name__ == "__main__":
    main()
