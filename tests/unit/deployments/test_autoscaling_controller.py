"""The policy in Serve's controller: what gateways report becomes targets, silence keeps them, and
an exception of ours is caught, counted and written down.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from polypath.deployments import autoscaling_controller as controller
from polypath.deployments.autoscaling_report import Numbers


@dataclass(frozen=True)
class Name:
    """As Serve's DeploymentID."""

    name: str


@dataclass(frozen=True)
class Point:
    timestamp: float
    value: float


@dataclass
class Context:
    """As much of Serve's AutoscalingContext as the policy may use."""

    current_num_replicas: int
    target_num_replicas: int
    policy_state: dict[str, Any] = field(default_factory=dict)
    raw_metrics: dict[str, dict[str, list[Point]]] = field(default_factory=dict)


NUMBERS: Numbers = {
    "model/0/target_queue_s": 5.0,
    "model/0/scale_down_delay_s": 60.0,
    "model/0/max_utilization": 0.75,
    "model/0/arriving_prompt": 0.0,
    "model/0/arriving_new": 0.0,
    "model/0/waiting_prompt": 0.0,
    "model/0/waiting_new": 0.0,
    "model/0/unfinished": 0.0,
}
POOL: Numbers = {
    "min_workers": 0.0,
    "max_workers": 4.0,
    "price": 1.0,
    "cold_start_s": 10.0,
    "order": -1.0,
    "ready": 0.0,
    "prefill_tokens_s": 1000.0,
    "decode_tokens_s": 100.0,
}
GATEWAY, CHEAP, DEAR = Name("gateway"), Name("m.cheap"), Name("m.dear")
written: list[dict[str, Any]] = []


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    written.clear()
    monkeypatch.setattr(controller, "JOURNAL", controller.Journal())
    monkeypatch.setattr(controller, "FRESHNESS", controller.Freshness())
    monkeypatch.setattr(controller, "_write", lambda text: written.append(json.loads(text)))
    yield


def contexts(
    sent_s: float = 1.0, gateways: int = 1, cheap: int = 0, dear: int = 0, **model: float
) -> dict[Name, Context]:
    numbers = NUMBERS | {f"model/0/{name}": value for name, value in model.items()}
    for name, price in ((CHEAP, 1.0), (DEAR, 8.0)):
        pool = POOL | {"price": price}
        numbers |= {f"pool/0/{name.name}/{key}": value for key, value in pool.items()}
    metrics = {
        name: {f"r{n}": [Point(sent_s - 1, -7.0), Point(sent_s, value)] for n in range(gateways)}
        for name, value in numbers.items()
    }
    return {
        GATEWAY: Context(gateways, gateways, raw_metrics=metrics),
        CHEAP: Context(cheap, cheap),
        DEAR: Context(dear, dear),
    }


def test_a_waiting_answer_wakes_the_cheap_pool_and_leaves_the_gateway_alone() -> None:
    targets, state = controller.answer(contexts(waiting_new=50.0, unfinished=1.0), 0.0)
    assert targets == {CHEAP: 1, DEAR: 0}
    assert state[CHEAP]["wanted"] == [(0.0, 1)]
    assert written[-1]["models"]["0"]["targets"] == {"m.cheap": 1, "m.dear": 0}


def test_loads_of_gateways_add_up() -> None:
    one, _ = controller.answer(contexts(gateways=1, arriving_new=70.0, unfinished=1.0), 0.0)
    three, _ = controller.answer(contexts(gateways=3, arriving_new=70.0, unfinished=1.0), 0.0)
    assert (one[CHEAP], three[CHEAP]) == (1, 3)


def test_the_memory_comes_back_through_serves_state() -> None:
    _, state = controller.answer(contexts(sent_s=1.0, arriving_new=200.0, unfinished=1.0), 0.0)
    later = contexts(sent_s=2.0, cheap=3)
    for key, context in later.items():
        context.policy_state = state[key]
    targets, state = controller.answer(later, 30.0)
    assert targets[CHEAP] == 3, "wanted half a minute ago"
    gone = contexts(sent_s=3.0, cheap=3)
    for key, context in gone.items():
        context.policy_state = state[key]
    assert controller.answer(gone, 95.0)[0][CHEAP] == 0


@pytest.mark.parametrize("lack", ["metrics", "gateway", "age"])
def test_missing_numbers_keep_every_target(lack: str) -> None:
    found = contexts(cheap=2)
    now_s = 0.0
    if lack == "metrics":
        found[GATEWAY].raw_metrics = {}
    elif lack == "gateway":
        del found[GATEWAY]
    else:
        controller.answer(found, 0.0)
        now_s = controller.STALE_S + 1
    targets, state = controller.answer(found, now_s)
    assert targets == {}, "a deployment that is not named keeps its target"
    assert set(state) == set(found)
    assert written[-1]["is_waiting"] and not written[-1]["errors"]


def test_a_report_that_lacks_a_number_is_an_error_that_is_caught_and_counted() -> None:
    found = contexts(cheap=2)
    del found[GATEWAY].raw_metrics["pool/0/m.cheap/price"]
    found[CHEAP].policy_state = {"wanted": [(0.0, 2)]}
    for tick in range(3):
        targets, state = controller.answer(found, float(tick))
        assert targets == {} and state[CHEAP] == {"wanted": [(0.0, 2)]}
    assert written[-1]["errors"] == 3
    assert "Traceback" in written[-1]["last_error"] and "max" in written[-1]["last_error"]


def test_a_store_that_is_away_stops_no_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(text: str) -> None:
        raise ConnectionError("gone")

    monkeypatch.setattr(controller, "_write", away)
    targets, _ = controller.answer(contexts(waiting_new=50.0, unfinished=1.0), 0.0)
    assert targets[CHEAP] == 1


def test_a_pool_that_serve_does_not_scale_counts_with_what_it_has() -> None:
    found = contexts(arriving_new=70.0, unfinished=1.0)
    del found[DEAR]
    for name, value in (("min_workers", 1.0), ("max_workers", 1.0), ("ready", 1.0)):
        metrics = found[GATEWAY].raw_metrics
        metrics[f"pool/0/m.dear/{name}"] = {"r0": [Point(1.0, value)]}
    assert controller.answer(found, 0.0)[0] == {CHEAP: 0}


def test_the_journal_is_written_once_a_second_at_most_and_only_when_it_changed() -> None:
    journal = controller.Journal()
    texts: list[str] = []
    journal.publish(0.0, texts.append)
    journal.publish(5.0, texts.append)
    journal.errors = 1
    journal.publish(5.5, texts.append)
    journal.errors = 2
    journal.publish(5.9, texts.append)
    assert [json.loads(text)["errors"] for text in texts] == [0, 1]


def test_a_pool_whose_worker_does_not_come_is_noted_and_the_next_one_is_asked() -> None:
    state: dict[Any, dict[str, Any]] = {}
    for now_s, wanted in ((0.0, 0), (9.0, 0), (10.0, 1), (21.0, 1)):
        found = contexts(sent_s=now_s, waiting_new=50.0, unfinished=1.0)
        found[CHEAP].target_num_replicas = 1
        for key, context in found.items():
            context.policy_state = state.get(key, {})
        targets, state = controller.answer(found, now_s)
        assert targets == {CHEAP: 1, DEAR: wanted}
    assert "no more come for 21 s" in written[-1]["models"]["0"]["why"]


def test_what_only_some_pools_can_serve_reaches_the_policy_by_their_names() -> None:
    found = contexts()
    fields = {"waiting_new": 50.0, "unfinished": 1.0}
    for name in ("arriving_prompt", "arriving_new", "waiting_prompt", *fields):
        point = Point(1.0, fields.get(name, 0.0))
        found[GATEWAY].raw_metrics[f"bound/0/m.dear/{name}"] = {"r0": [point]}
    assert controller.answer(found, 0.0)[0] == {CHEAP: 0, DEAR: 1}
