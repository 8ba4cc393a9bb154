"""Driving an engine in tests: build it over a small pool, run requests, look at its logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch

from polypath.runtime.checkpoint.source import open_checkpoint
from polypath.runtime.config import EngineConfig
from polypath.runtime.engine import Engine
from polypath.runtime.forward_batch import ForwardBatch
from polypath.runtime.forward_mode import ForwardMode
from polypath.runtime.planning.hardware import load_hardware
from polypath.runtime.planning.planner import plan as make_plan
from polypath.runtime.request import (
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)
from polypath.runtime.scheduler import RequestState, ScheduledRow

YARDSTICK: dict[str, Any] = {
    "attention_backend": "torch_sdpa",
    "ops": "torch",
    "linear_method": "dense",
}
"""The plain path, which is compared with transformers; "auto" is what the planner takes here."""

NEAR_TIE = 1e-3  # of log-probability; a greedy token may differ where two are closer than this


@dataclass(slots=True)
class Answer:
    """All that a request gave."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    first_position: int | None = None
    error: str | None = None


def build_engine(
    folder: Path | str,
    *,
    pages: int | None = None,
    page_size: int = 16,
    **config: Any,
) -> Engine:
    """An engine over a tiny model; `pages` usable pages (one more is the scratch page)."""
    kv_bytes = None if pages is None else (pages + 1) * page_size * _bytes_per_token(folder)
    settings: dict[str, Any] = {"self_check": False, "calibration": False}
    settings |= {"kv_bytes": kv_bytes, "page_size": page_size}
    engine = Engine.build(EngineConfig(model=str(folder), **(settings | config)))
    torch.set_num_threads(1)  # a second one waits for the first when tests share the machine
    return engine


def planned_path(model: Path | str = "") -> str:
    """Name of the path that this node's plan takes for decode batches."""
    checkpoint = open_checkpoint(str(model))
    plan = make_plan(load_hardware("this"), checkpoint.config, EngineConfig(model=str(model)))
    return plan.path_name(ForwardMode.DECODE)


def planned_header() -> str:
    """What `x-polypath-path` says of this node's plan for the default model."""
    plan = make_plan(load_hardware("this"), open_checkpoint("").config, EngineConfig(model=""))
    names = {mode: plan.path_name(mode) for mode in plan.paths}
    if len(set(names.values())) == 1:
        return next(iter(names.values()))
    return ", ".join(f"{mode}={name}" for mode, name in names.items())


def build_yardstick(folder: Path | str, **options: Any) -> Engine:
    """`build_engine` on the plain path."""
    return build_engine(folder, **(YARDSTICK | options))


def _bytes_per_token(folder: Path | str) -> int:
    return open_checkpoint(str(folder)).config.kv_bytes_per_token(itemsize=4)


def request(
    request_id: str,
    prompt_ids: Sequence[int],
    *,
    output_ids: Sequence[int] = (),
    priority: int = 0,
    **sampling: Any,
) -> Request:
    """A greedy request unless `sampling` says otherwise."""
    params: dict[str, Any] = {"temperature": 0.0} | sampling
    return Request(
        id=request_id,
        prompt_ids=tuple(prompt_ids),
        output_ids=tuple(output_ids),
        priority=priority,
        sampling=SamplingParams(**params),
    )


def collect(answers: dict[str, Answer], outputs: Iterable[RequestOutput]) -> None:
    """Add one step's outputs to the answers; positions must follow one another."""
    for output in outputs:
        answer = answers.setdefault(output.request_id, Answer())
        assert answer.finish_reason is None, f"{output.request_id} spoke after its end"
        if answer.first_position is None:
            answer.first_position = output.position
        assert output.position == answer.first_position + len(answer.token_ids)
        answer.token_ids.extend(output.token_ids)
        answer.logprobs.extend(output.logprobs)
        if output.prompt_logprobs is not None:
            assert answer.prompt_logprobs is None, "prompt log-probabilities come once"
            answer.prompt_logprobs = output.prompt_logprobs
        answer.finish_reason = output.finish_reason
        answer.cached_tokens = output.cached_tokens
        answer.error = output.error


def finish(engine: Engine, answers: dict[str, Answer] | None = None) -> dict[str, Answer]:
    """Step until nothing is left; the engine must then hold no page."""
    answers = {} if answers is None else answers
    for _ in range(100_000):
        if not engine.has_work():
            assert_empty(engine)
            return answers
        collect(answers, engine.step())
    raise AssertionError("the engine does not come to an end")


def run(engine: Engine, requests: Iterable[Request]) -> dict[str, Answer]:
    """Submit all at once and run to the end."""
    for each in requests:
        engine.submit(each)
    return finish(engine)


def run_alone(engine: Engine, requests: Iterable[Request]) -> dict[str, Answer]:
    """Run one after another."""
    answers: dict[str, Answer] = {}
    for each in requests:
        answers |= run(engine, [each])
    return answers


def assert_empty(engine: Engine) -> None:
    """Nothing runs, waits or holds a page."""
    stats = engine.stats()
    assert (stats["running"], stats["waiting"], stats["kv_pages_used"]) == (0, 0, 0)
    assert engine.pages.num_free == engine.pages.num_usable


def assert_same_greedy(ours: Sequence[int], reference: Answer) -> None:
    """Equal ids, or a first difference at a near-tie of the reference (which has logprobs of 2)."""
    for i, (a, b) in enumerate(zip(ours, reference.token_ids, strict=False)):
        if a != b:
            (_, first), (_, second) = reference.logprobs[i].top[:2]
            print(f"first difference at token {i}: gap {first - second:.2e}")
            assert first - second < NEAR_TIE, f"token {i} is {a}, expected {b}"
            return
    assert len(ours) == len(reference.token_ids)


def prompts(count: int, *, longest: int = 60, seed: int = 0, vocab: int = 260) -> list[list[int]]:
    """Random prompts of very different lengths."""
    rng = Random(seed)
    lengths = [1 + int((longest - 1) * rng.random() ** 2) for _ in range(count)]
    return [[rng.randrange(4, vocab) for _ in range(length)] for length in lengths]


def greedy(count: int, **sampling: Any) -> list[Request]:
    """Greedy requests of very different lengths, `greedy-0` and so on."""
    return [
        request(f"greedy-{i}", ids, max_tokens=20, logprobs=2, **sampling)
        for i, ids in enumerate(prompts(count))
    ]


def assert_same_answers(ours: dict[str, Answer], reference: dict[str, Answer]) -> None:
    """Drawn ids equal; greedy ones equal up to a near-tie."""
    assert ours.keys() == reference.keys()
    for name, answer in reference.items():
        if name.startswith("greedy"):
            assert_same_greedy(ours[name].token_ids, answer)
        else:
            assert ours[name].token_ids == answer.token_ids
        assert ours[name].finish_reason == answer.finish_reason


def paged_logits(
    engine: Engine, sequences: Sequence[Sequence[int]], steps: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Logits [T, V] of each sequence, run teacher-forced through the paged path.

    `steps[i][j]` tokens of sequence j run in step i. Pages are dealt out of order at random.
    """
    rng = Random(0)
    pool = list(range(1, engine.pages.num_usable + 1))
    rng.shuffle(pool)
    states = []
    for i, ids in enumerate(sequences):
        state = RequestState(Request(id=str(i), prompt_ids=tuple(ids)), i, len(ids) + 1)
        state.pages = [pool.pop() for _ in range(engine.pages.pages_for(len(ids)))]
        states.append(state)
    found: list[list[torch.Tensor]] = [[] for _ in sequences]
    for counts in steps:
        rows = [ScheduledRow(s, n) for s, n in zip(states, counts, strict=True) if n]
        batch = ForwardBatch.build(rows, page_size=engine.pages.page_size, device=engine._device)
        batch = batch.with_logits_rows(range(batch.num_tokens))
        logits, _, _ = engine._runner.forward(batch)
        for row, part in zip(rows, logits.values.split([r.num_tokens for r in rows]), strict=True):
            found[row.state.arrival].append(part.clone())  # a graph writes there again
            row.state.num_computed += row.num_tokens
    return [torch.cat(parts) for parts in found]
