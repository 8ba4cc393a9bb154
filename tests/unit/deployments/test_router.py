"""The router: never to a worker that lacks what is required; otherwise where it ends first."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from polypath.deployments.needs import Needs, parse_requirements
from polypath.deployments.router import (
    Ask,
    Decision,
    Forecasts,
    RouteReason,
    RoutingRules,
    choose,
)
from polypath.deployments.served_worker import Job, Worker
from polypath.runtime.errors import ConfigurationError, RequestError
from polypath.tests.paced import PacedLink
from polypath.tests.virtual_time import run_virtually


async def _worker(link: PacedLink) -> Worker:
    return Worker.of(link, await link.describe())


def workers(*links: PacedLink) -> list[Worker]:
    """What a gateway makes of these."""

    async def ask() -> list[Worker]:
        return [await _worker(link) for link in links]

    return run_virtually(ask())


def ask(requires: str = "", *, num_tokens: int = 10, num_answer: int = 100, **given: object) -> Ask:
    requirements, is_deterministic = parse_requirements(requires)
    needs = Needs(
        num_tokens=num_tokens, requirements=requirements, is_deterministic=is_deterministic
    )
    return Ask(needs=needs, num_prompt=10, num_answer=num_answer, **given)  # type: ignore[arg-type]


def chosen(asked: Ask, among: list[Worker]) -> Decision:
    return choose(asked, among, Forecasts(1000.0))


def fill(worker: Worker, count: int, *, left: int = 100) -> None:
    """Give a worker requests that each have `left` tokens to go."""
    for _ in range(count):
        worker.jobs.add(Job(worker=worker, num_uncomputed=0, num_expected=left))


def cuda_plan(**changes: object) -> dict[str, object]:
    decode = {"runner": "cuda_graph", "attention_backend": "flashinfer", "ops": "triton"}
    prefill = decode | {"runner": "eager"}
    plan = {"device": "cuda", "linear_method": "dense", "kv_dtype": "bfloat16"}
    plan["quantization"] = "stored"
    return plan | {"paths": {"decode": decode, "prefill": prefill}} | changes


@pytest.mark.parametrize(
    ("requires", "fits"),
    [
        ("device=cpu", ["cpu"]),
        ("device=cuda", ["gpu"]),
        ("device!=cuda", ["cpu"]),
        ("device=cpu|cuda", ["cpu", "gpu"]),
        ("deterministic", ["cpu"]),
        ("runner=cuda_graph", ["gpu"]),
        ("prefill.runner=cuda_graph", []),
        ("prefill.runner=eager, runner=cuda_graph", ["gpu"]),
        ("attention=flashinfer", ["gpu"]),
        ("ops=paced", ["cpu"]),
        ("linear=dense", ["gpu"]),
        ("quantization=stored", ["gpu"]),
        ("quantization!=stored", ["cpu"]),
        ("pool=cards", ["gpu"]),
        ("worker=cpu", ["cpu"]),
        ("plan=pp-gpu", ["gpu"]),
        ("label.zone=b", ["gpu"]),
        ("label.zone!=b", ["cpu"]),
        ("", ["cpu", "gpu"]),
        (" , ", ["cpu", "gpu"]),
    ],
)
def test_each_kind_of_requirement(requires: str, fits: list[str]) -> None:
    cpu = PacedLink("cpu", batch_invariant=True)
    gpu = PacedLink("gpu", plan=cuda_plan(), pool="cards", labels={"zone": "b"})
    decision = chosen(ask(requires), workers(cpu, gpu))
    assert [c.worker.id for c in decision.candidates if not c.refused] == fits
    assert (decision.worker is not None) == bool(fits)


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("speed=high", "the keys deterministic, runner"),
        ("device", "key=value"),
        ("decode.device=cpu", "key=value"),
        ("verify.runner=eager", "key=value"),
        ("device=", "values are names"),
        ("device=cpu|", "values are names"),
        ("label.=b", "key=value"),
        ("device=a b", "values are names"),
        ("device=cpu\u00e9", "\\xe9"),
        (",".join(["device=cpu"] * 17), "at most 16"),
    ],
)
def test_a_wrong_requirement_is_told_with_the_grammar(text: str, piece: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_requirements(text)
    assert caught.value.param == "x-polypath-require"
    assert piece in caught.value.message
    assert caught.value.message.isascii()


def test_the_context_and_the_whole_kv_pool_bound_a_request() -> None:
    small = PacedLink("small", plan={"num_pages": 17, "page_size": 16}, max_model_len=4096)
    large = PacedLink("large")
    among = workers(small, large)
    assert chosen(ask(num_tokens=256, num_answer=1), [among[0]]).worker is among[0]
    decision = chosen(ask(num_tokens=257), among)
    assert decision.worker is among[1]
    assert decision.candidates[0].refused == ("it holds 256 tokens of 257",)


def test_a_feature_that_a_plan_lacks_is_named() -> None:
    (worker,) = workers(PacedLink("w", features=["logprobs"]))
    needs = Needs(features=frozenset({"prompt_logprobs", "logprobs"}))
    assert needs.why_not(worker) == ["it has no prompt_logprobs"]


def test_the_faster_worker_is_taken_and_at_four_to_one_it_is_worth_waiting_for() -> None:
    fast, slow = workers(
        PacedLink("fast", 0.01, max_num_seqs=4), PacedLink("slow", 0.04, max_num_seqs=4)
    )
    assert chosen(ask(), [slow, fast]).worker is fast
    fill(fast, 5, left=10)
    decision = chosen(ask(), [slow, fast])
    assert (decision.worker, decision.can_start) == (fast, False)
    fill(fast, 40, left=100)
    decision = chosen(ask(), [slow, fast])
    assert (decision.worker, decision.can_start) == (slow, True)


def test_a_long_prompt_goes_where_prompts_run_faster() -> None:
    prefills = PacedLink("prefills", 0.05, prefill_tokens_s=5000.0)
    decodes = PacedLink("decodes", 0.01, prefill_tokens_s=200.0)
    among = workers(prefills, decodes)
    long = Ask(needs=Needs(), num_prompt=2000, num_answer=4)
    short = Ask(needs=Needs(), num_prompt=10, num_answer=400)
    assert chosen(long, among).worker is among[0]
    assert chosen(short, among).worker is among[1]


def test_unmeasured_workers_share_evenly() -> None:
    among = workers(*(PacedLink(f"w{n}", is_calibrated=False) for n in range(3)))
    for _ in range(9):
        worker = chosen(ask(), among).worker
        assert worker is not None
        fill(worker, 1)
    assert [worker.num_in_flight for worker in among] == [3, 3, 3]


class TestPools:
    """`prefer` and `spill`."""

    def among(self) -> list[Worker]:
        return workers(
            PacedLink("card", 0.01, pool="gpu", max_num_seqs=2),
            PacedLink("big", 0.02, pool="cpu", max_num_seqs=2),
            PacedLink("old", 0.001, pool="other", max_num_seqs=2),
        )

    def test_the_first_pool_with_room_is_taken_though_another_is_faster(self) -> None:
        card, big, old = self.among()
        rules = RoutingRules(prefer=("gpu", "cpu"))
        first = chosen(ask(rules=rules), [old, big, card])
        assert (first.worker, first.reason) == (card, RouteReason.PREFERRED)
        fill(card, 3)
        second = chosen(ask(rules=rules), [old, big, card])
        assert (second.worker, second.reason) == (big, RouteReason.SPILLED)
        fill(big, 3)
        assert chosen(ask(rules=rules), [old, big, card]).worker is old

    def test_without_spill_requests_wait_for_the_best_pool(self) -> None:
        card, big, old = self.among()
        fill(card, 3)
        rules = RoutingRules(prefer=("gpu",), spill=False)
        decision = chosen(ask(rules=rules), [old, big, card])
        assert (decision.worker, decision.can_start) == (card, False)

    def test_a_pool_that_cannot_serve_the_request_is_no_reason_to_wait(self) -> None:
        among = self.among()
        rules = RoutingRules(prefer=("gpu",), spill=False)
        decision = chosen(ask("pool!=gpu", rules=rules), among)
        assert decision.worker is among[2]
        assert decision.can_start

    def test_rules_that_make_no_sense_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="twice"):
            RoutingRules(prefer=("a", "a"))


class TestResuming:
    """Where an answer goes on that another worker began."""

    def test_it_stays_with_its_class_while_that_has_room(self) -> None:
        before, twin, other = workers(
            PacedLink("before"),
            PacedLink("twin", 0.5),
            PacedLink("other", 0.001, plan=cuda_plan()),
        )
        decision = chosen(ask(came_from=before, avoids={before}), [before, other, twin])
        assert (decision.worker, decision.reason) == (twin, RouteReason.RESUMED_SAME)

    def test_it_waits_for_its_class_before_it_changes(self) -> None:
        before, twin, other = workers(
            PacedLink("before"),
            PacedLink("twin", max_num_seqs=1),
            PacedLink("other", plan=cuda_plan()),
        )
        fill(twin, 2)
        waits = ask(came_from=before, may_change_class=False)
        decision = chosen(waits, [other, twin])
        assert (decision.worker, decision.can_start) == (twin, False)
        decision = chosen(ask(came_from=before), [other, twin])
        assert (decision.worker, decision.reason) == (other, RouteReason.RESUMED_OTHER)

    def test_a_deterministic_answer_never_changes_class(self) -> None:
        before, other = workers(
            PacedLink("before", batch_invariant=True),
            PacedLink("other", plan=cuda_plan(), batch_invariant=True),
        )
        needs = Needs(is_deterministic=True, continues=before)
        asked = Ask(needs=needs, num_prompt=1, num_answer=1, came_from=before)
        decision = chosen(asked, [other])
        assert decision.worker is None
        assert decision.candidates[0].refused == ("it would not go on exactly as before did",)


def test_never_to_a_worker_that_lacks_what_is_required() -> None:
    """Random fleets, loads and requirements against the plain reading of each requirement."""
    rng = random.Random(0)
    outcomes: Counter[bool] = Counter()
    for _ in range(300):
        links = [_random_link(rng, n) for n in range(rng.randint(1, 6))]
        fleet = workers(*links)
        for worker in fleet:
            fill(worker, rng.randrange(12), left=rng.randrange(1, 300))
        device, zone = rng.choice(["cpu", "cuda"]), rng.choice("abc")
        num_tokens = rng.choice([10, 500, 3000])
        decision = chosen(ask(f"device={device}, label.zone!={zone}", num_tokens=num_tokens), fleet)
        able = [
            worker
            for worker in fleet
            if worker.plan_value("device") == device
            and worker.labels["zone"] != zone
            and worker.max_model_len >= num_tokens
        ]
        assert (decision.worker is None) == (not able)
        assert decision.worker is None or decision.worker in able
        outcomes[decision.worker is None] += 1
    assert min(outcomes.values()) > 30, "both outcomes were tried"


def _random_link(rng: random.Random, number: int) -> PacedLink:
    return PacedLink(
        f"w{number}",
        rng.choice([0.01, 0.04, 0.2]),
        max_num_seqs=rng.choice([1, 4, 8]),
        max_model_len=rng.choice([256, 1024, 4096]),
        plan=cuda_plan() if rng.random() < 0.5 else {"device": "cpu"},
        labels={"zone": rng.choice("abc")},
        is_calibrated=rng.random() < 0.7,
    )


def test_the_decision_explains_itself() -> None:
    among = workers(PacedLink("a", pool="p"), PacedLink("b", plan=cuda_plan()))
    said = chosen(ask("device=cpu"), among).to_json(waited_s=0.25)
    assert said["worker"] == "a"
    assert said["reason"] == "only_capable"
    assert said["waited_s"] == 0.25
    first, second = said["candidates"]
    assert first["pool"] == "p"
    assert first["seconds"] == pytest.approx(100 * 0.01, rel=0.1)
    assert second["refused"] == ["device is cuda, not cpu"]


def test_virtual_time_runs_ahead() -> None:
    async def sleep() -> float:
        loop = asyncio.get_running_loop()
        start = loop.time()
        await asyncio.sleep(3600)
        return loop.time() - start

    assert run_virtually(sleep()) == pytest.approx(3600, abs=0.1)
