"""The gateway's queue: finite, in order, emptied by those who leave, and fed by measured speed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

import pytest

from polypath.actors.load import WorkerLoad
from polypath.deployments.errors import ApiError
from polypath.deployments.needs import Needs
from polypath.deployments.router import Ask, RoutingRules
from polypath.deployments.served_worker import Job, Worker
from polypath.deployments.waiting import Limits, Line
from polypath.runtime.errors import EngineError, QueueFullError, RequestError
from polypath.runtime.request import Request, SamplingParams
from polypath.tests.paced import PacedLink
from polypath.tests.virtual_time import run_virtually


async def line_of(*links: PacedLink, **limits: float) -> tuple[Line, dict[str, Worker]]:
    workers: dict[str, Worker] = {}
    for link in links:
        workers[link.worker_id] = Worker.of(link, await link.describe())
    return Line(workers, Limits(**limits)), workers  # type: ignore[arg-type]


def ask(num_answer: int = 20, rules: RoutingRules | None = None, **needs: object) -> Ask:
    return Ask(
        needs=Needs(**needs),  # type: ignore[arg-type]
        num_prompt=10,
        num_answer=num_answer,
        rules=rules or RoutingRules(),
    )


async def serve(line: Line, asked: Ask, name: str, priority: int = 0) -> float:
    """Place one answer and run it to its end; seconds from arrival to the last token."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    job = await line.place(asked, priority=priority, arrived_s=start)
    sampling = SamplingParams(max_tokens=asked.num_answer)
    prompt = tuple(4 + n for n in range(asked.num_prompt))
    request = Request(id=name, prompt_ids=prompt, sampling=sampling)
    try:
        async for output in job.worker.link.generate(request):
            job.received(len(output.token_ids))
    finally:
        job.end()
        line.changed()
    return loop.time() - start


def virtually(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Run a test on the virtual clock."""

    def run() -> None:
        async def work() -> None:
            await test()

        run_virtually(work())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@virtually
async def test_a_worker_gets_only_what_it_can_start() -> None:
    link = PacedLink("w", max_num_seqs=3)
    line, workers = await line_of(link)
    tasks = [asyncio.create_task(serve(line, ask(), str(n))) for n in range(12)]
    await asyncio.sleep(0.05)
    assert workers["w"].num_in_flight == link.num_held == 4, "three run, one is ready to"
    assert len(line) == 8
    await asyncio.gather(*tasks)
    assert link.peak == 3
    assert len(line) == workers["w"].num_in_flight == 0


@virtually
async def test_first_by_priority_then_by_arrival() -> None:
    line, _ = await line_of(PacedLink("w", max_num_seqs=1))
    ended: list[str] = []

    async def one(name: str, priority: int) -> None:
        await serve(line, ask(), name, priority)
        ended.append(name)

    names = [("a", 0), ("b", 0), ("c", 5), ("d", 0), ("e", -1), ("f", 5)]
    tasks = []
    for name, priority in names:
        tasks.append(asyncio.create_task(one(name, priority)))
        await asyncio.sleep(0.001)
    await asyncio.gather(*tasks)
    assert "".join(ended) == "abedcf", "a runs and b is on the worker before e comes"


@virtually
async def test_an_answer_that_waits_for_one_worker_does_not_hold_up_another() -> None:
    only, other = PacedLink("only", max_num_seqs=1), PacedLink("other", max_model_len=64)
    line, workers = await line_of(only, other)
    long = [asyncio.create_task(serve(line, ask(num_tokens=900), f"l{n}")) for n in range(5)]
    await asyncio.sleep(0.01)
    assert len(line) == 3
    short = asyncio.create_task(serve(line, ask(), "short"))
    await asyncio.sleep(0)
    assert workers["other"].num_in_flight == 1
    await asyncio.gather(short, *long)
    assert {len(request.prompt_ids) for request in other.requests} == {10}
    assert len(other.requests) == 1


@virtually
async def test_a_later_answer_does_not_take_the_place_of_an_earlier_one() -> None:
    """The first in line may go to `only` alone; the others may, but there it is before them."""
    only, slow = PacedLink("only", 0.01, max_num_seqs=1), PacedLink("slow", 1.0, max_num_seqs=1)
    slow.max_model_len = 64
    line, _ = await line_of(only, slow)
    order: list[str] = []

    async def one(name: str, num_tokens: int = 30) -> None:
        await serve(line, ask(10, num_tokens=num_tokens), name)
        order.append(name)

    tasks = [asyncio.create_task(one(f"first{n}")) for n in range(2)]
    await asyncio.sleep(0.001)
    tasks.append(asyncio.create_task(one("long", num_tokens=900)))
    await asyncio.sleep(0.001)
    tasks += [asyncio.create_task(one(f"later{n}")) for n in range(3)]
    await asyncio.gather(*tasks)
    assert order.index("long") < min(order.index(f"later{n}") for n in range(3))


@virtually
async def test_a_full_queue_says_when_to_come_back() -> None:
    line, _ = await line_of(PacedLink("w", 0.1, max_num_seqs=1), max_queued=4)
    line.require_space(6)
    with pytest.raises(QueueFullError):
        line.require_space(7)
    tasks = [asyncio.create_task(serve(line, ask(), str(n))) for n in range(6)]
    await asyncio.sleep(10)
    while len(line) < 4:
        tasks.append(asyncio.create_task(serve(line, ask(), str(len(tasks)))))
        await asyncio.sleep(0)
    with pytest.raises(QueueFullError) as caught:
        line.require_space(1)
    assert "4 answers wait here" in caught.value.message
    assert caught.value.retry_after_s == pytest.approx(line.queue_time_s())
    assert 2.0 < line.queue_time_s() < 12.0, "what the last ones waited, at 2 s an answer"
    await asyncio.gather(*tasks)
    assert line.queue_time_s() == 0.0


@virtually
async def test_who_leaves_as_a_place_comes_free_takes_it_from_nobody() -> None:
    """Cancelled, but not run since: a pass in between gave it the place, failed, and stopped."""
    line, workers = await line_of(PacedLink("w", max_num_seqs=1))
    running = [await line.place(ask(), arrived_s=0.0) for _ in range(2)]
    first = asyncio.create_task(line.place(ask(), arrived_s=1.0))
    second = asyncio.create_task(line.place(ask(), arrived_s=2.0))
    await asyncio.sleep(0)
    running[0].end()
    line.changed()  # the pass is to come
    first.cancel()
    job = await asyncio.wait_for(second, 0.01)
    assert first.cancelled() and workers["w"].jobs == {running[1], job} and len(line) == 0


@virtually
async def test_those_who_leave_leave_nothing() -> None:
    """A storm: 200 come, each goes at a random moment, before or after it got a worker."""
    links = [PacedLink(f"w{n}", 0.02, max_num_seqs=2) for n in range(2)]
    line, workers = await line_of(*links, max_queued=400)
    rng = random.Random(1)
    tasks = [asyncio.create_task(serve(line, ask(), str(n))) for n in range(200)]
    for task in rng.sample(tasks, 200):
        await asyncio.sleep(rng.choice([0.0, 0.0, 0.001, 0.01]))
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(line) == 0
    assert all(worker.num_in_flight == 0 for worker in workers.values())
    assert all(link.num_held == 0 for link in links)
    assert await serve(line, ask(), "next") < 1.0


@virtually
async def test_leaving_in_the_moment_of_the_placement_gives_the_place_back() -> None:
    line, workers = await line_of(PacedLink("w", max_num_seqs=1))
    task = asyncio.create_task(serve(line, ask(), "a"))
    await asyncio.sleep(0)
    assert workers["w"].num_in_flight == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert workers["w"].num_in_flight == 0


@virtually
async def test_what_nobody_can_serve_is_told_at_once_with_what_each_lacks() -> None:
    line, _ = await line_of(PacedLink("a"), PacedLink("b", max_model_len=100))
    with pytest.raises(RequestError) as caught:
        await line.place(ask(is_deterministic=True, num_tokens=200), arrived_s=0.0)
    assert caught.value.code == "no_capable_worker"
    assert "a: its paths are not all batch invariant." in caught.value.message
    assert "b: it holds 100 tokens of 200; its paths" in caught.value.message


@virtually
async def test_without_any_worker_an_answer_waits_a_while_for_one() -> None:
    line, workers = await line_of(stranded_s=5.0)
    loop = asyncio.get_running_loop()
    start = loop.time()
    with pytest.raises(ApiError) as caught:
        await line.place(ask(), arrived_s=start)
    assert caught.value.status == 503
    assert 5.0 <= loop.time() - start < 5.2
    waiting = asyncio.create_task(serve(line, ask(), "a"))
    await asyncio.sleep(3.0)
    link = PacedLink("late")
    workers["late"] = Worker.of(link, await link.describe())
    line.changed()
    assert await waiting < 4.0


@virtually
async def test_a_stranded_resume_ends_with_what_the_last_worker_said() -> None:
    line, workers = await line_of(PacedLink("w"), stranded_s=1.0)
    asked = ask()
    asked.avoids.add(workers["w"])
    with pytest.raises(EngineError, match="it died"):
        await line.place(asked, arrived_s=0.0, last_error=EngineError("it died"))


@virtually
async def test_a_worker_that_drains_gets_nothing() -> None:
    line, workers = await line_of(PacedLink("leaves", 0.001), PacedLink("stays", 0.1))
    workers["leaves"].is_leaving = True
    await asyncio.gather(*(serve(line, ask(4), str(n)) for n in range(12)))
    assert not workers["leaves"].link.requests  # type: ignore[attr-defined]


async def load(
    line: Line, rate: float, count: int, rng: random.Random, rules: RoutingRules | None = None
) -> list[float]:
    """Answers of mixed lengths that arrive at random; the latency of each."""
    tasks: list[asyncio.Task[float]] = []
    for number in range(count):
        asked = ask(rng.randint(10, 60), rules)
        tasks.append(asyncio.create_task(serve(line, asked, f"{id(line)}-{number}")))
        await asyncio.sleep(rng.expovariate(rate))
    return await asyncio.gather(*tasks)


@pytest.mark.parametrize("steps_s", [(0.01, 0.04), (0.01, 0.03, 0.05), (0.02, 0.02)])
def test_under_load_traffic_follows_measured_speed(steps_s: Sequence[float]) -> None:
    """Tokens of each worker within 15% of its share of the whole speed."""

    async def work() -> list[int]:
        links = [PacedLink(f"w{n}", step_s) for n, step_s in enumerate(steps_s)]
        line, _ = await line_of(*links, max_queued=10_000)
        await load(line, rate=1000.0, count=600, rng=random.Random(2))
        return [link.num_tokens for link in links]

    tokens = run_virtually(work())
    total_speed = sum(1 / step_s for step_s in steps_s)
    for num_tokens, step_s in zip(tokens, steps_s, strict=True):
        share = (1 / step_s) / total_speed
        assert num_tokens / sum(tokens) == pytest.approx(share, rel=0.15)


class TellingLink(PacedLink):
    """Says how busy it is, as real workers do with each step."""

    def load(self) -> WorkerLoad:
        return WorkerLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            queued_tokens=0,
            kv_pages_free=1000,
            prefill_tokens_s=0.0,
            decode_tokens_s=0.0,
            step_s=0.0,
            sent_s=0.0,
        )


def test_traffic_follows_measured_speed_also_from_gateways_that_do_not_know_each_other() -> None:
    """Three queues over the same workers; each sees of the others what the workers say."""

    async def work() -> list[int]:
        links = [TellingLink(f"w{n}", step_s) for n, step_s in enumerate((0.01, 0.04, 0.04))]
        lines = [(await line_of(*links, max_queued=1000))[0] for _ in range(3)]
        loop = asyncio.get_running_loop()
        until_s = loop.time() + 6.0

        async def client(line: Line, name: str) -> None:
            count = 0
            while loop.time() < until_s:
                count += 1
                await serve(line, ask(20), f"{name}-{count}")

        await asyncio.gather(*(client(lines[n % 3], str(n)) for n in range(45)))
        return [link.num_tokens for link in links]

    tokens = run_virtually(work())
    for num_tokens, share in zip(tokens, (4 / 6, 1 / 6, 1 / 6), strict=True):
        assert num_tokens / sum(tokens) == pytest.approx(share, rel=0.15)


def test_the_slowest_are_far_better_off_than_with_power_of_two_choices() -> None:
    """Two replicas at 4:1, the same arrivals, at 70% of what both can do together."""

    def run(policy: str) -> list[float]:
        async def work() -> list[float]:
            fast, slow = PacedLink("fast", 0.01), PacedLink("slow", 0.04)
            line, _ = await line_of(fast, slow, max_queued=10_000)
            rate = 0.7 * (8 / 0.01 + 8 / 0.04) / 35  # of tokens, at 35 an answer
            rules = RoutingRules(policy=policy)  # type: ignore[arg-type]
            return await load(line, rate, 800, random.Random(3), rules)

        return sorted(run_virtually(work()))

    ours, theirs = run("fastest"), run("power_of_two")
    p95 = int(0.95 * len(ours))
    print(f"p95: {ours[p95]:.2f} s against {theirs[p95]:.2f} s")
    assert theirs[p95] > 1.5 * ours[p95]
    mean = [sum(run) / len(run) for run in (ours, theirs)]
    print(f"mean: {mean[0]:.2f} s against {mean[1]:.2f} s")
    assert mean[0] < mean[1]
    good_s = 1.2 * 60 * 0.01
    good = [sum(latency <= good_s for latency in run) for run in (ours, theirs)]
    print(f"within {good_s:.2f} s: {good[0]} against {good[1]} of {len(ours)}")
    assert good[0] > 1.1 * good[1]


def test_at_low_load_the_slow_worker_is_left_alone() -> None:
    async def work() -> list[int]:
        links = [PacedLink("fast", 0.01), PacedLink("slow", 0.08)]
        line, _ = await line_of(*links)
        await load(line, rate=1.0, count=40, rng=random.Random(4))
        return [len(link.requests) for link in links]

    assert run_virtually(work()) == [40, 0]


def test_a_job_that_runs_longer_than_expected_is_expected_to_go_on() -> None:
    async def work() -> list[int]:
        _, workers = await line_of(PacedLink("w"))
        job = Job(worker=workers["w"], num_uncomputed=10, num_expected=8)
        left = []
        for _ in range(4):
            left.append(job.num_left)
            job.received(8)
        return left

    assert run_virtually(work()) == [8, 3, 5, 7]
