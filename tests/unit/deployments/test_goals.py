"""Goals: seconds to the last token that a request aims at, and what the queue does for them."""

from __future__ import annotations

import asyncio
import random

import pytest

from polypath.deployments.needs import Needs
from polypath.deployments.router import Ask, Forecasts, RouteReason, RoutingRules, choose, is_late
from polypath.deployments.served_worker import Job, Worker
from polypath.deployments.ticket import PATIENCE
from polypath.deployments.waiting import Limits, Line
from polypath.tests.paced import PacedLink
from polypath.tests.paced_load import PacedLoad, answer
from polypath.tests.virtual_time import run_virtually

PAIR, ONE_OF_FOUR = (0.01, 0.04), (0.01, 0.04, 0.04, 0.04)
GOAL_S = 0.4  # twice what the mean answer takes on a fast worker


async def fleet(*links: PacedLink) -> dict[str, Worker]:
    return {link.worker_id: Worker.of(link, await link.describe()) for link in links}


def ask(num_answer: int = 20, **given: object) -> Ask:
    return Ask(needs=Needs(), num_prompt=10, num_answer=num_answer, **given)  # type: ignore[arg-type]


def fill(worker: Worker, count: int, left: int) -> None:
    for _ in range(count):
        worker.jobs.add(Job(worker=worker, num_uncomputed=0, num_expected=left))


def p95(seconds: list[float]) -> float:
    return seconds[int(0.95 * len(seconds))]


def good(seconds: list[float]) -> float:
    return sum(each <= GOAL_S for each in seconds) / len(seconds)


@pytest.mark.parametrize("steps_s", [PAIR, ONE_OF_FOUR])
@pytest.mark.parametrize("load", [0.5, 0.9])
def test_without_goals_the_slowest_are_far_better_off_than_with_power_of_two(
    steps_s: tuple[float, ...], load: float
) -> None:
    run = PacedLoad(steps_s=steps_s, load=load, num_requests=200)
    assert p95(run.run("power_of_two")) > 1.5 * p95(run.run("fastest"))


@pytest.mark.parametrize(
    ("steps_s", "load", "least"),
    [(PAIR, 0.5, 1.15), (PAIR, 1.05, 1.35), (ONE_OF_FOUR, 0.5, 1.5), (ONE_OF_FOUR, 0.9, 1.35)],
)
def test_with_goals_far_more_answers_keep_them_than_with_power_of_two(
    steps_s: tuple[float, ...], load: float, least: float
) -> None:
    """Of a pair power of two uses the fast one for three quarters, so at half load 1.3 is all."""
    run = PacedLoad(steps_s=steps_s, load=load, num_requests=200)
    assert good(run.run("fastest", GOAL_S)) > least * good(run.run("power_of_two"))


def test_goals_are_kept_more_often_where_lengths_are_only_expected_too() -> None:
    run = PacedLoad(steps_s=ONE_OF_FOUR, load=0.8, num_requests=200, are_lengths_known=False)
    assert good(run.run("fastest", GOAL_S)) > 1.15 * good(run.run("power_of_two"))


def test_an_answer_that_would_be_late_by_waiting_takes_what_is_free() -> None:
    async def work() -> None:
        workers = await fleet(PacedLink("fast", 0.01), PacedLink("slow", 0.04))
        fill(workers["fast"], 9, left=10)  # the next place is free in 0.1 s
        now_s = asyncio.get_running_loop().time()
        for goal_s, found in [(None, "fast"), (10.0, "fast"), (0.25, "slow")]:
            due_s = None if goal_s is None else now_s + goal_s
            decision = choose(ask(due_s=due_s), workers.values(), Forecasts(now_s))
            assert decision.worker is workers[found]
            assert decision.can_start == (found == "slow")
        assert decision.reason is RouteReason.LATE
        fill(workers["slow"], 9, left=20)
        decision = choose(ask(due_s=now_s), workers.values(), Forecasts(now_s))
        assert not decision.can_start, "nothing is free: it waits as others do"

    run_virtually(work())


def test_a_late_answer_keeps_to_the_pools_it_may_use() -> None:
    async def work() -> None:
        card, other = PacedLink("card", 0.01, pool="gpu"), PacedLink("other", 0.04)
        workers = await fleet(card, other)
        fill(workers["card"], 9, left=20)
        now_s = asyncio.get_running_loop().time()
        rules = RoutingRules(prefer=("gpu",), spill=False)
        asked = ask(rules=rules, due_s=now_s)
        decision = choose(asked, workers.values(), Forecasts(now_s))
        assert (decision.worker, decision.can_start) == (workers["card"], False)

    run_virtually(work())


def test_what_cannot_keep_its_goal_lets_others_pass_for_a_while() -> None:
    """One place. The first in line is late; those behind it are not, and one comes every 0.2 s."""

    async def work() -> list[str]:
        line = Line(await fleet(PacedLink("w", 0.01, max_num_seqs=1)), Limits(max_queued=1000))
        loop, ended = asyncio.get_running_loop(), []

        async def one(name: str, goal_s: float) -> None:
            await answer(line, ask(due_s=loop.time() + goal_s), name, 20)
            ended.append(name)

        tasks = [asyncio.create_task(one(f"before{n}", 100.0)) for n in range(3)]
        await asyncio.sleep(0.01)
        tasks.append(asyncio.create_task(one("late", 0.5)))
        for number in range(20):
            await asyncio.sleep(0.2)
            tasks.append(asyncio.create_task(one(f"after{number:02}", 100.0)))
        await asyncio.gather(*tasks)
        return ended

    ended = run_virtually(work())
    place = ended.index("late")
    # It comes when it has waited PATIENCE goals of 0.5 s, and an answer takes 0.2 s.
    assert 3 + 2 < place <= PATIENCE * 0.5 / 0.2 + 2, ended


def test_every_answer_gets_its_turn_whatever_the_goals() -> None:
    """Random goals, priorities and lengths at more than full load: all end, each once."""

    async def work(rng: random.Random) -> tuple[int, int]:
        workers = await fleet(PacedLink("a", 0.01, max_num_seqs=2), PacedLink("b", 0.05))
        line = Line(workers, Limits(max_queued=1000))
        loop = asyncio.get_running_loop()
        tasks = []
        for number in range(100):
            goal_s = rng.choice([None, -1.0, 0.05, 0.5, 5.0])
            asked = ask(rng.randint(1, 40))
            asked.due_s = None if goal_s is None else loop.time() + goal_s
            priority = rng.choice([0, 0, 1])
            work = answer(line, asked, str(number), asked.num_answer, priority)
            tasks.append(asyncio.create_task(work))
            await asyncio.sleep(rng.expovariate(200.0))
        await asyncio.gather(*tasks)
        assert len(line) == sum(worker.num_in_flight for worker in workers.values()) == 0
        made = [worker.link.num_tokens for worker in workers.values()]  # type: ignore[attr-defined]
        return sum(made), sum(task.result() > 0 for task in tasks)

    for seed in range(3):
        tokens, ended = run_virtually(work(random.Random(seed)))
        rng = random.Random(seed)
        expected = 0
        for _ in range(100):
            rng.choice([None, -1.0, 0.05, 0.5, 5.0])
            expected += rng.randint(1, 40)
            rng.choice([0, 0, 1])
            rng.expovariate(200.0)
        assert (tokens, ended) == (expected, 100)


def test_without_a_goal_nothing_is_late() -> None:
    assert not is_late(None, 1e9, 1e9)
    assert is_late(10.0, 9.0, 1.1) and not is_late(10.0, 9.0, 1.0)
