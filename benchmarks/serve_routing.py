"""Ray Serve's own routing beside ours, on real Ray processes: benchmarks/serve_routing.py.

Each arm has workers of the same unequal speeds, 8 requests at once each, whose steps sleep. Serve
routes by its default power of two choices to a plain deployment, at its default of 5 requests at
once for a replica and at the 8 that a replica runs; our router sends to plain actors. One unary
call an answer in both, the same arrivals and lengths in turns, so routing alone differs.
"""

# ruff: noqa: TID251  (a script that measures Serve needs Ray)

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from typing import Any

import ray
from ray import serve

from polypath.deployments.needs import Needs
from polypath.deployments.router import Ask, RoutingRules
from polypath.deployments.served_worker import Worker
from polypath.deployments.waiting import Limits, Line
from polypath.runtime.request import Request, SamplingParams
from polypath.tests.paced import PacedLink

SHORTEST, LONGEST = 5, 35  # tokens of an answer, all lengths alike
MEAN = (SHORTEST + LONGEST) / 2
PLACES = 8
PROMPT = tuple(range(4, 14))
Arm = Callable[[str, int], Awaitable[None]]  # name and tokens of an answer


class Paced:
    """A worker in a process of its own, whose steps sleep."""

    def __init__(self, step_s: float) -> None:
        self._link = PacedLink("paced", step_s, max_num_seqs=PLACES, max_waiting=10_000)

    async def answer(self, name: str, num_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=num_tokens)
        async for _ in self._link.generate(Request(id=name, prompt_ids=PROMPT, sampling=sampling)):
            pass


class Speeds:
    """Hands each replica of a deployment its speed."""

    def __init__(self, steps_s: Sequence[float]) -> None:
        self._left = list(steps_s)

    def take(self) -> float:
        return self._left.pop()


class Replica(Paced):
    """One replica of a plain deployment."""

    def __init__(self, speeds: Any) -> None:  # Any: the handle of a `Speeds`
        super().__init__(ray.get(speeds.take.remote()))


def by_serve(steps_s: Sequence[float], limit: int | None) -> Arm:
    """Serve's default router; `limit` is max_ongoing_requests, None its default."""
    name = f"paced-{limit}"
    given: dict[str, Any] = {} if limit is None else {"max_ongoing_requests": limit}
    deployment: Any = serve.deployment(
        name=name, num_replicas=len(steps_s), ray_actor_options={"num_cpus": 0}, **given
    )(Replica)
    remote: Any = ray.remote(num_cpus=0)(Speeds)
    speeds = remote.remote(steps_s)
    handle: Any = serve.run(deployment.bind(speeds), name=name, route_prefix=None)

    async def answer(number: str, num_tokens: int) -> None:
        await handle.answer.remote(number, num_tokens)

    return answer


async def by_us(steps_s: Sequence[float], goal_s: float | None) -> Arm:
    """Our queue and router in this process, and an actor for each worker."""
    links = [PacedLink(f"w{n}", step_s, max_waiting=10_000) for n, step_s in enumerate(steps_s)]
    workers = {link.worker_id: Worker.of(link, await link.describe()) for link in links}
    line = Line(workers, Limits(max_queued=100_000))
    make: Any = ray.remote  # its overloads do not know both options together
    remote = make(num_cpus=0, max_concurrency=10_000)(Paced)
    actors: dict[str, Any] = {f"w{n}": remote.remote(step_s) for n, step_s in enumerate(steps_s)}
    await asyncio.gather(*(actor.answer.remote("warm", 1) for actor in actors.values()))

    async def answer(number: str, num_tokens: int) -> None:
        now_s = asyncio.get_running_loop().time()
        due_s = None if goal_s is None else now_s + goal_s
        ask = Ask(
            needs=Needs(),
            num_prompt=len(PROMPT),
            num_answer=num_tokens,
            rules=RoutingRules(policy="fastest"),
            doubt=0.0,
            due_s=due_s,
        )
        job = await line.place(ask, priority=0, arrived_s=now_s)
        try:
            await actors[job.worker.id].answer.remote(number, num_tokens)
        finally:
            job.end()
            line.changed()

    return answer


async def turn(arm: Arm, rate: float, num_requests: int, seed: int) -> list[float]:
    """Seconds from arrival to the last token of each answer."""
    rng, loop = random.Random(seed), asyncio.get_running_loop()

    async def timed(name: str, num_tokens: int) -> float:
        start_s = loop.time()
        await arm(name, num_tokens)
        return loop.time() - start_s

    tasks: list[asyncio.Task[float]] = []
    due_s = loop.time()
    for number in range(num_requests):
        await asyncio.sleep(max(0.0, due_s - loop.time()))
        tasks.append(asyncio.create_task(timed(f"{seed}-{number}", rng.randint(SHORTEST, LONGEST))))
        due_s += rng.expovariate(rate)
    return await asyncio.gather(*tasks)


async def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Of each arm, in rising order; the arms take turns, A B C D D C B A."""
    steps_s, goal_s = options.steps, options.goal
    served = [await asyncio.to_thread(by_serve, steps_s, limit) for limit in (None, PLACES)]
    arms = {
        "ours": await by_us(steps_s, None),
        f"ours, goal {goal_s:g} s": await by_us(steps_s, goal_s),
        "Serve, max_ongoing_requests 5 (default)": served[0],
        f"Serve, max_ongoing_requests {PLACES}": served[1],
    }
    for arm in arms.values():  # connections and routers start at their first call
        await asyncio.gather(*(arm(f"warm-{n}", 1) for n in range(PLACES * len(steps_s))))
    rate = options.load * sum(PLACES / step_s for step_s in steps_s) / MEAN
    print(f"{options.load:.0%} load: {rate:.1f} requests/s, {options.requests} in each turn")
    found: dict[str, list[list[float]]] = {name: [] for name in arms}
    for number in range(options.rounds):
        for name in list(arms) if number % 2 == 0 else reversed(arms):
            found[name].append(await turn(arms[name], rate, options.requests, 3 + number))
    return {name: sorted(chain(*runs)) for name, runs in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=float, nargs="+", default=[0.02, 0.08, 0.08, 0.08])
    parser.add_argument("--load", type=float, default=0.5, help="of what all can do together")
    parser.add_argument("--requests", type=int, default=90)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--goal", type=float, default=0.8, help="seconds to the last token")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, logging_level=logging.ERROR,
        log_to_driver=False, object_store_memory=80 * 1024 * 1024,
    )  # fmt: skip
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        serve.start(proxy_location="Disabled")
        found = asyncio.run(measure(options))
        serve.shutdown()
    finally:
        ray.shutdown()
    print(f"\n| routed by | p50 | p95 | p99 | within {options.goal:g} s |\n|" + "---|" * 5)
    for name, seconds in found.items():
        p50, p95, p99 = (seconds[int(share * len(seconds))] for share in (0.5, 0.95, 0.99))
        good = sum(each <= options.goal for each in seconds) / len(seconds)
        print(f"| {name} | {p50:.2f} s | {p95:.2f} s | {p99:.2f} s | {good:.0%} |")
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
