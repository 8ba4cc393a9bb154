"""Case 16: penalties stay with their request, whatever runs beside it."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest

from polypath.runtime.engine import Engine
from polypath.runtime.request import Request
from polypath.tests.driving import (
    Answer,
    build_engine,
    collect,
    finish,
    prompts,
    request,
    run,
    run_alone,
)


@pytest.fixture(scope="module")
def engine(random_llama: Path) -> Engine:
    """Room for everything; no prefix cache, so that tests do not feed each other."""
    return build_engine(random_llama, pages=400, prefix_cache=False)


def _neighbours() -> dict[str, Request]:
    ids = prompts(5, longest=50, seed=6)
    return {
        "A": request("A", ids[0], max_tokens=12),
        "B": request("B", ids[1] * 3, max_tokens=12, repetition_penalty=2.0),
        "C": request("C", ids[2][:1], max_tokens=12, frequency_penalty=2.0),
        "D": request("D", ids[3], max_tokens=12, presence_penalty=-2.0),
        "E": request("E", ids[4], max_tokens=12, temperature=1.0, seed=3, top_k=5),
    }


def test_penalties_stay_with_their_request_in_all_24_orders(engine: Engine) -> None:
    everyone = _neighbours()
    expected = {k: a.token_ids for k, a in run_alone(engine, everyone.values()).items()}
    for order in permutations("ABCD"):
        found = run(engine, [everyone[name] for name in order])
        assert {k: a.token_ids for k, a in found.items()} == {k: expected[k] for k in order}


def test_penalties_stay_with_their_request_while_others_join_and_leave(engine: Engine) -> None:
    everyone = _neighbours()
    expected = {k: a.token_ids for k, a in run_alone(engine, everyone.values()).items()}
    answers: dict[str, Answer] = {}
    for name in "EDCBA":
        engine.submit(everyone[name])
        for _ in range(4):
            collect(answers, engine.step())
    finish(engine, answers)
    assert {k: a.token_ids for k, a in answers.items()} == expected


def test_presence_does_not_count_the_prompt(engine: Engine) -> None:
    ids = [77] * 200
    plain = run(engine, [request("a", ids, max_tokens=1)])["a"]
    punished = run(engine, [request("a", ids, max_tokens=1, presence_penalty=2.0)])["a"]
    assert punished.token_ids == plain.token_ids
