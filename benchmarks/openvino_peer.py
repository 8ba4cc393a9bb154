"""Peer for `polypath bench engine --vs openvino=FOLDER`: OpenVINO GenAI's continuous batching.

FOLDER holds the model in OpenVINO's form, 8 bits (convert.py makes it). Protocol: peer.py.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from peer import Run, Settings, Task, Workload, answer, fail, need, read_task

HOW = """install it into an environment of its own: python3 -m venv peers && peers/bin/pip install
openvino-genai openvino-tokenizers, then give --peer-python peers/bin/python"""
CACHE_GB = 2
TOKENS_A_STEP = (256, 512, 4096)


class OpenVino:
    """One pipeline, rebuilt when a workload wants other settings."""

    def __init__(self, task: Task) -> None:
        self._genai: Any = need("openvino_genai", HOW)  # Any: modules without types here
        self._core: Any = need("openvino", HOW)
        self._np: Any = need("numpy", HOW)
        self._task = task
        self._built: tuple[Settings, Any] | None = None
        if not (Path(task.model) / "openvino_model.xml").is_file():
            fail(
                f"{task.model} has no openvino_model.xml; make it with benchmarks/convert.py (see "
                "benchmarks/README.md) and give --vs openvino=FOLDER"
            )

    @property
    def version(self) -> str:
        """Package and precision of keys and values."""
        return f"openvino-genai {self._genai.__version__}"

    def measure(self, workload: Workload, settings: Settings, prompts: list[list[int]]) -> Run:
        """All requests at once; a step at a time, so that the first tokens can be timed."""
        pipeline = self._pipeline(settings)
        config = self._genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = workload.new_tokens
        config.ignore_eos = True
        config.do_sample = False
        start = time.perf_counter()
        handles = [
            pipeline.add_request(
                i, self._core.Tensor(self._np.array([prompt], dtype=self._np.int64)), config
            )
            for i, prompt in enumerate(prompts)
        ]
        counts = [0] * len(handles)
        first, at_first = 0.0, 0
        while pipeline.has_non_finished_requests():
            pipeline.step()
            _read(handles, counts)
            if not first and all(counts):
                first, at_first = time.perf_counter(), sum(counts)
        end = time.perf_counter()
        prompt_tokens = sum(map(len, prompts))
        return Run(prompt_tokens, sum(counts), start, first, end, sum(counts) - at_first)

    def _pipeline(self, settings: Settings) -> Any:
        if self._built is None or self._built[0] != settings:
            self._built = None  # frees the old one's cache first
            scheduler = self._genai.SchedulerConfig()
            scheduler.cache_size = CACHE_GB
            scheduler.max_num_batched_tokens = settings["max_num_batched_tokens"]
            scheduler.max_num_seqs = max(w.batch for w in self._task.workloads)
            scheduler.enable_prefix_caching = False
            properties = {"INFERENCE_NUM_THREADS": self._task.threads}
            folder = self._task.model
            pipeline = self._genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
            self._built = (settings, pipeline)
            self.measure(Workload(1, 16, 2), settings, [[0] * 16])  # first touches
        return self._built[1]


def _read(handles: list[Any], counts: list[int]) -> None:
    """Add the tokens that each request got in this step."""
    for i, handle in enumerate(handles):
        while handle.can_read():
            counts[i] += sum(len(out.generated_ids) for out in handle.read().values())


def choices(workload: Workload) -> list[Settings]:
    """Tokens a step: it matters where prompts are longer than the smallest."""
    sizes = TOKENS_A_STEP if workload.new_tokens == 1 else TOKENS_A_STEP[-1:]
    return [{"max_num_batched_tokens": size} for size in sizes]


def main() -> None:
    """Read the task, load, measure, print."""
    task = read_task()
    openvino = OpenVino(task)
    answer(task, openvino.version, choices, openvino.measure)


if __name__ == "__main__":
    main()
