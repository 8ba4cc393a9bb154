"""Graphs change how kernels are launched and nothing else: the same tokens as eager on the same
kernels, through storms of preemption, cancelling and resuming.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from polypath.runtime.engine import Engine
from polypath.runtime.forward_mode import ForwardMode
from polypath.runtime.graphs.mechanism import CaptureError
from polypath.runtime.ladder import CapturingRunner
from polypath.runtime.planning.hardware import load_hardware
from polypath.runtime.planning.rules import native_variant
from polypath.runtime.runners.graph import GraphRunner
from polypath.tests.driving import Answer, assert_empty, build_engine, collect, finish, request, run

pytestmark = pytest.mark.skipif(
    native_variant(load_hardware("this")) is None, reason="no build of the kernels fits this CPU"
)


def no_decode_graphs(patch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, size: int) -> None:
        raise CaptureError("not in this test")

    patch.setattr(GraphRunner, "capture", refuse)


def engines(model: Path | str, patch: pytest.MonkeyPatch, **options: int) -> dict[str, Engine]:
    """By the runner of decode steps."""
    found = {
        "cpu_graph": build_engine(model, **options),
        "eager": build_engine(model, runner="eager", **options),
    }
    with patch.context() as only_here:
        no_decode_graphs(only_here)
        found["piecewise_cpu_graph"] = build_engine(model, **options)
    for name, engine in found.items():
        assert engine.plan.path_name(ForwardMode.DECODE).startswith(f"{name}+")
    return found


def graph_bytes(engine: Engine) -> int:
    runners = {id(r): r for rs in engine._runner._runners.values() for r in rs}
    return sum(r.num_bytes for r in runners.values() if isinstance(r, CapturingRunner))


def test_storms_leave_nothing_behind_and_change_no_token(
    random_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = engines(random_llama, monkeypatch, pages=24, max_num_seqs=8)
    answers = {name: storm(engine, seed=1) for name, engine in found.items()}
    assert answers["cpu_graph"] == answers["eager"] == answers["piecewise_cpu_graph"]
    assert found["cpu_graph"].stats()["preemptions_total"], "the pool is too large for a storm"


def storm(engine: Engine, seed: int) -> dict[str, list[int]]:
    """Tokens of all requests that were left to end, some of them resumed halfway."""
    rng, before = Random(seed), graph_bytes(engine)
    assert before or engine.plan.path_name(ForwardMode.DECODE).startswith("eager")
    answers: dict[str, Answer] = {}
    cancelled: set[str] = set()
    for i in range(60):
        prompt = [rng.randrange(4, 260) for _ in range(rng.randrange(1, 70))]
        output = [rng.randrange(4, 260) for _ in range(rng.choice([0, 0, 5]))]
        engine.submit(request(f"r{i}", prompt, output_ids=output, max_tokens=30, ignore_eos=True))
        if rng.random() < 0.3:
            victim = f"r{rng.randrange(i + 1)}"
            cancelled.add(victim)
            engine.cancel(victim)
        for _ in range(rng.randrange(4)):
            collect(answers, engine.step())
    finish(engine, answers)
    assert_empty(engine)
    assert graph_bytes(engine) == before
    return {n: a.token_ids for n, a in sorted(answers.items()) if n not in cancelled}


@pytest.mark.slow
def test_a_thousand_continuations_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(3)
    prompts = [[rng.randrange(49152) for _ in range(rng.randrange(1, 24))] for _ in range(1000)]
    answers = {}
    for name, engine in engines("", monkeypatch, pages=200).items():
        requests = [request(f"r{i}", ids, max_tokens=12) for i, ids in enumerate(prompts)]
        found: dict[str, Answer] = {}
        for start in range(0, 1000, 250):  # within the finite queue
            found |= run(engine, requests[start : start + 250])
        answers[name] = {n: a.token_ids for n, a in found.items()}
        steps = engine.counters.steps
        decodes = {(r, why): n for (mode, r, why), n in steps.items() if mode == "decode"}
        assert decodes.get((name, "planned"), 0) >= 0.95 * sum(decodes.values())
    assert answers["cpu_graph"] == answers["eager"]
    assert answers["piecewise_cpu_graph"] == answers["eager"]
