"""Measures an engine in process: prefill and decode rates, where a step's time goes, and the
machine's ceilings.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import asdict, dataclass
from itertools import count

import torch

from .engine import Engine
from .request import Request, SamplingParams

_numbers = count()


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """`batch` random prompts of `prompt_tokens` each, answered greedily with `new_tokens` each."""

    batch: int
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Rates in tokens/s over the whole batch, times in milliseconds a step; medians when several
    runs were taken.
    """

    workload: Workload
    prefill_tokens_s: float  # prompt tokens over the time until every row had its first token
    decode_tokens_s: (
        float  # tokens after the first of each row over the time after it; 0 without any
    )
    step_ms: float  # of decode steps
    host_ms: float  # the part of `step_ms` outside the forward pass
    steps: dict[str, int]  # "mode runner reason" -> steps, from the engine's own counters

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)


def measure(engine: Engine, workload: Workload, seed: int = 0) -> Measurement:
    """Run one workload on an idle engine; prompts differ by `seed`, so that no prefix is shared
    between runs.
    """
    assert not engine.has_work(), "the engine is busy"
    before = dict(engine.counters.steps)
    _submit(engine, workload, seed)
    start = time.perf_counter()
    waiting = workload.batch
    while waiting:
        waiting -= sum(o.position == 0 and bool(o.token_ids) for o in engine.step())
    first = time.perf_counter()
    generated, forward, steps = _state(engine)
    while engine.has_work():
        engine.step()
    decode_s = time.perf_counter() - first
    decoded, forward_s, num_steps = (
        b - a for a, b in zip((generated, forward, steps), _state(engine), strict=True)
    )
    return Measurement(
        workload=workload,
        prefill_tokens_s=workload.batch * workload.prompt_tokens / (first - start),
        decode_tokens_s=decoded / decode_s if decoded else 0.0,
        step_ms=1e3 * decode_s / num_steps if num_steps else 0.0,
        host_ms=1e3 * (decode_s - forward_s) / num_steps if num_steps else 0.0,
        steps={
            " ".join(key): n - before.get(key, 0)
            for key, n in engine.counters.steps.items()
            if n > before.get(key, 0)
        },
    )


def median(measurements: list[Measurement]) -> Measurement:
    """Each figure's median over several runs of one workload; the step counts of the last."""
    last = measurements[-1]

    def middle(name: str) -> float:
        return statistics.median(getattr(m, name) for m in measurements)

    return Measurement(
        workload=last.workload,
        prefill_tokens_s=middle("prefill_tokens_s"),
        decode_tokens_s=middle("decode_tokens_s"),
        step_ms=middle("step_ms"),
        host_ms=middle("host_ms"),
        steps=last.steps,
    )


def _submit(engine: Engine, workload: Workload, seed: int) -> None:
    rng = random.Random(f"{seed} {workload}")
    vocab = engine.model.config.vocab_size
    sampling = SamplingParams(temperature=0.0, max_tokens=workload.new_tokens, ignore_eos=True)
    for _ in range(workload.batch):
        prompt = tuple(rng.randrange(vocab) for _ in range(workload.prompt_tokens))
        engine.submit(Request(id=f"bench-{next(_numbers)}", prompt_ids=prompt, sampling=sampling))


def _state(engine: Engine) -> tuple[int, float, int]:
    counters = engine.counters
    return counters.generation_tokens, counters.forward_seconds, sum(counters.steps.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """What this machine can do at most, measured with torch on the threads it is given."""

    threads: int
    read_gb_s: float  # streaming a buffer far larger than the caches
    fp32_gflop_s: float  # a 1024 x 1024 x 1024 matrix product


def ceilings(threads: int, repeats: int = 5) -> Ceilings:
    """Measure read bandwidth and matrix rate; the best of `repeats`, since noise only slows."""
    torch.set_num_threads(threads)
    buffer = torch.ones(64 << 20)
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    read = min(_seconds(lambda: buffer.sum()) for _ in range(repeats))
    multiply = min(_seconds(lambda: a @ b) for _ in range(repeats))
    return Ceilings(
        threads=torch.get_num_threads(),
        read_gb_s=buffer.numel() * buffer.element_size() / read / 1e9,
        fp32_gflop_s=2 * 1024**3 / multiply / 1e9,
    )


def _seconds(action: object) -> float:
    assert callable(action)
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
