"""Measures an engine in process: prefill and decode rates, and where a step's time goes."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import asdict, dataclass, fields
from itertools import count

from .engine import Engine
from .errors import ConfigurationError
from .planning.memory import ITEMSIZE
from .request import Request, SamplingParams
from .roofline import ModelCost
from .weights import stored_bytes

_numbers = count()
FLOAT_METHODS = ("dense", "dense_native")  # linear methods that multiply floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """`batch` random prompts of `prompt_tokens` each, answered greedily with `new_tokens` each."""

    batch: int
    prompt_tokens: int
    new_tokens: int

    @property
    def context(self) -> float:
        """Mean tokens of keys and values that a decode step reads for each row."""
        return self.prompt_tokens + self.new_tokens / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Rates in tokens/s over the whole batch, times in milliseconds a step; medians when several
    runs were taken.
    """

    workload: Workload
    prefill_tokens_s: float  # prompt tokens over the time until every row had its first token
    decode_tokens_s: float  # all rows', from then on while all decode; 0 without any
    step_ms: float  # of decode steps; 0 where a peer does not tell
    forward_ms: float  # the part of `step_ms` in the runner
    host_ms: float  # the part of it outside
    steps: dict[str, int]  # "mode runner reason" -> steps, from the engine's own counters

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)


def measure(engine: Engine, workload: Workload, seed: int = 0) -> Measurement:
    """Run one workload on an idle engine; prompts differ by `seed`, so that no prefix is shared
    between runs.

    Decode is timed while all rows decode: rows whose prompt came early would otherwise end early
    and leave a smaller batch to the others. ConfigurationError when the engine cannot hold it.
    """
    assert not engine.has_work(), "the engine is busy"
    check_fits(engine, workload)
    before = dict(engine.counters.steps)
    ids = _submit(engine, workload, seed)
    start = time.perf_counter()
    waiting = workload.batch
    while waiting:
        waiting -= sum(o.position == 0 and bool(o.token_ids) for o in engine.step())
    first = time.perf_counter()
    generated, forward, steps = _state(engine)
    for _ in range(workload.new_tokens - 1):
        engine.step()
    decode_s = time.perf_counter() - first
    decoded, forward_s, num_steps = (
        b - a for a, b in zip((generated, forward, steps), _state(engine), strict=True)
    )
    assert decoded == workload.batch * (workload.new_tokens - 1), "a row did not decode"
    taken = {key: n - before.get(key, 0) for key, n in engine.counters.steps.items()}
    _end(engine, ids)
    return Measurement(
        workload=workload,
        prefill_tokens_s=workload.batch * workload.prompt_tokens / (first - start),
        decode_tokens_s=decoded / decode_s if decoded else 0.0,
        step_ms=1e3 * decode_s / num_steps if num_steps else 0.0,
        forward_ms=1e3 * forward_s / num_steps if num_steps else 0.0,
        host_ms=1e3 * (decode_s - forward_s) / num_steps if num_steps else 0.0,
        steps={" ".join(key): n for key, n in taken.items() if n},
    )


def median(measurements: list[Measurement]) -> Measurement:
    """Each figure's median over several runs of one workload; steps are summed."""
    middle = {
        f.name: statistics.median(getattr(m, f.name) for m in measurements)
        for f in fields(Measurement)
        if f.name not in ("workload", "steps")
    }
    steps: dict[str, int] = {}
    for m in measurements:
        for key, n in m.steps.items():
            steps[key] = steps.get(key, 0) + n
    return Measurement(workload=measurements[-1].workload, steps=steps, **middle)


def random_prompts(workload: Workload, vocab: int, seed: int) -> list[list[int]]:
    """Token ids of each row; benchmarks/peer.py draws the same."""
    rng = random.Random(f"{seed} {workload.batch} {workload.prompt_tokens}")
    rows = range(workload.batch)
    return [[rng.randrange(vocab) for _ in range(workload.prompt_tokens)] for _ in rows]


def check_fits(engine: Engine, workload: Workload) -> None:
    """ConfigurationError, with the option to turn, when the engine cannot run all rows at once."""
    plan = engine.plan
    longest = workload.prompt_tokens + workload.new_tokens + _slack(engine, workload)
    pages = workload.batch * engine.pages.pages_for(longest)
    for wanted, limit, what, option in (
        (workload.batch, plan.max_num_seqs, "requests at once", "--max-num-seqs"),
        (longest, plan.max_model_len, "tokens a request", "--max-model-len"),
        (pages, engine.pages.num_usable, "KV pages", "--kv-bytes"),
    ):
        if wanted > limit:
            raise ConfigurationError(
                f"{workload.batch} x ({workload.prompt_tokens} + {workload.new_tokens}) tokens "
                f"need {wanted} {what}, and this engine has {limit}; raise {option} or measure less"
            )


def model_cost(engine: Engine) -> ModelCost:
    """What this engine's roofline counts with."""
    config, weights = engine.model.config, engine.model.weights
    return ModelCost(
        config=config,
        weight_bytes=stored_bytes(config, weights),
        embedding_bytes=0 if config.tie_word_embeddings else weights.embedding.num_bytes,
        kv_itemsize=ITEMSIZE[engine.plan.kv_dtype],
        is_int8=engine.plan.linear_method not in FLOAT_METHODS,
    )


def _slack(engine: Engine, workload: Workload) -> int:
    """Tokens that a row may generate while the others' prompts are still being computed."""
    if workload.batch == 1:
        return 0
    per_step = max(1, engine.plan.max_num_batched_tokens - workload.batch)
    return workload.batch * workload.prompt_tokens // per_step + 2


def _submit(engine: Engine, workload: Workload, seed: int) -> list[str]:
    ids = []
    most = workload.new_tokens + _slack(engine, workload)
    sampling = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
    for prompt in random_prompts(workload, engine.model.config.vocab_size, seed):
        ids.append(f"bench-{next(_numbers)}")
        engine.submit(Request(id=ids[-1], prompt_ids=tuple(prompt), sampling=sampling))
    return ids


def _end(engine: Engine, ids: list[str]) -> None:
    for request_id in ids:
        engine.cancel(request_id)
    while engine.has_work():
        engine.step()


def _state(engine: Engine) -> tuple[int, float, int]:
    counters = engine.counters
    return counters.generation_tokens, counters.forward_seconds, sum(counters.steps.values())
