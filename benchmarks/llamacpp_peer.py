"""Peer for `polypath bench engine --vs llama.cpp`: batched decoding through llama-cpp-python's C
interface.

Each workload is tried with flash attention on and off, with one KV stream a sequence and a common
one, and prompts in several micro-batches; the fastest is kept. Greedy, by numpy's argmax, which is
cheaper than llama.cpp's own sampler chain. Protocol: peer.py.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from itertools import product
from typing import Any

from peer import Run, Settings, Task, Workload, answer, fail, need, read_task

HOW = """install it into an environment of its own, built for this processor: python3 -m venv peers
&& CMAKE_ARGS=-DGGML_NATIVE=ON peers/bin/pip install llama-cpp-python, then give
--peer-python peers/bin/python"""
PREFILL_MICRO_BATCHES = (64, 128, 256, 512)
LONG = 1024  # tokens of all prompts; past it, tuning tries fewer settings


class Llama:
    """A model, and contexts for one workload after the other."""

    def __init__(self, task: Task) -> None:
        self._api: Any = need("llama_cpp", HOW)  # Any: a module without types here
        self._np: Any = need("numpy", HOW)
        self._task = task
        self._quiet = self._api.llama_log_callback(lambda level, text, data: None)
        self._api.llama_log_set(self._quiet, None)
        self._api.llama_backend_init()
        params = self._api.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = self._api.llama_model_load_from_file(task.model.encode(), params)
        if not self._model:
            fail(f"llama.cpp cannot load {task.model}")
        self.vocab = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))
        if self.vocab != task.vocab:
            fail(f"{task.model} has {self.vocab} tokens where the engine's model has {task.vocab}")

    @property
    def version(self) -> str:
        """Package, and what the build uses of this processor."""
        features = self._api.llama_print_system_info().decode()
        used = [part.split(" = ")[0].split(":")[-1].strip() for part in features.split("|")]
        names = " ".join(used[i] for i, part in enumerate(features.split("|")) if " = 1" in part)
        return f"llama-cpp-python {self._api.__version__} ({names})"

    def measure(self, workload: Workload, settings: Settings, prompts: list[list[int]]) -> Run:
        """Prompts in batches of at most `n_batch` tokens, then one token a sequence and step."""
        context = self._context(workload, settings)
        batch = self._api.llama_batch_init(max(512, workload.batch), 0, 1)
        try:
            start = time.perf_counter()
            tokens = self._prefill(context, batch, prompts)
            first = time.perf_counter()
            generated = len(tokens)
            for step in range(workload.new_tokens - 1):
                position = workload.prompt_tokens + step
                rows = range(workload.batch)
                self._fill(batch, [(tokens[i], position, i, True) for i in rows])
                self._decode(context, batch)
                tokens = self._greedy(context, rows)
                generated += len(tokens)
            end = time.perf_counter()
        finally:
            self._api.llama_batch_free(batch)
            self._api.llama_free(context)
        count = sum(map(len, prompts))
        return Run(count, generated, start, first, end, generated - workload.batch)

    def _context(self, workload: Workload, settings: Settings) -> Any:
        """Room for every sequence; streams hold a multiple of 256 tokens each."""
        params = self._api.llama_context_default_params()
        length = workload.prompt_tokens + workload.new_tokens
        params.n_ctx = workload.batch * (-(-length // 256) * 256)
        params.n_batch = max(512, workload.batch)
        params.n_ubatch = settings["n_ubatch"]
        params.n_seq_max = workload.batch
        params.n_threads = params.n_threads_batch = self._task.threads
        params.flash_attn_type = settings["flash_attn"]
        params.kv_unified = settings["kv_unified"]
        params.no_perf = True
        context = self._api.llama_init_from_model(self._model, params)
        if not context:
            fail(f"llama.cpp cannot make a context of {params.n_ctx} tokens with {settings}")
        # First touches: its KV cells and compute buffers come from the system now.
        batch = self._api.llama_batch_init(1, 0, 1)
        self._fill(batch, [(0, 0, 0, True)])
        self._decode(context, batch)
        self._api.llama_batch_free(batch)
        self._api.llama_memory_clear(self._api.llama_get_memory(context), True)
        return context

    def _prefill(self, context: Any, batch: Any, prompts: list[list[int]]) -> list[int]:
        """First token of each sequence."""
        last = len(prompts[0]) - 1
        todo = [
            (token, position, row, position == last)
            for row, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        tokens: list[int] = []
        size = max(512, len(prompts))
        for at in range(0, len(todo), size):
            part = todo[at : at + size]
            self._fill(batch, part)
            self._decode(context, batch)
            tokens += self._greedy(context, [i for i, entry in enumerate(part) if entry[3]])
        return tokens

    def _fill(self, batch: Any, entries: Sequence[tuple[int, int, int, bool]]) -> None:
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, wants_logits) in enumerate(entries):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wants_logits

    def _decode(self, context: Any, batch: Any) -> None:
        code = self._api.llama_decode(context, batch)
        if code != 0:
            fail(f"llama_decode answered {code} for a batch of {batch.n_tokens} tokens")

    def _greedy(self, context: Any, rows: Sequence[int]) -> list[int]:
        tokens = []
        for row in rows:
            logits = self._api.llama_get_logits_ith(context, row)
            array = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * self.vocab)).contents
            tokens.append(int(self._np.frombuffer(array, dtype=self._np.float32).argmax()))
        return tokens


def choices(workload: Workload) -> list[Settings]:
    """What tuning tries: all of it where a run is short."""
    is_long = workload.batch * workload.prompt_tokens > LONG
    sizes = PREFILL_MICRO_BATCHES if workload.new_tokens == 1 else (512,)
    sizes = tuple(size for size in sizes if size >= workload.batch)
    flash = (1,) if is_long and workload.batch > 1 else (0, 1)
    unified = (False,) if is_long or workload.batch == 1 else (False, True)
    return [
        {"flash_attn": f, "kv_unified": u, "n_ubatch": n}
        for f, u, n in product(flash, unified, sizes)
    ]


def main() -> None:
    """Read the task, load, measure, print."""
    task = read_task()
    llama = Llama(task)
    answer(task, llama.version, choices, llama.measure)


if __name__ == "__main__":
    main()
