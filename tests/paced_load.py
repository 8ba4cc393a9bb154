"""The same random arrivals on paced workers of stated speeds, by either policy, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from polypath.deployments.needs import Needs
from polypath.deployments.resume import DOUBT
from polypath.deployments.router import Ask, Policy, RoutingRules
from polypath.deployments.served_worker import Worker
from polypath.deployments.waiting import Limits, Line
from polypath.runtime.request import Request, SamplingParams
from polypath.tests.paced import PacedLink
from polypath.tests.virtual_time import run_virtually

PROMPT_TOKENS = 10
PREFILL_TOKENS_S = 10_000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PacedLoad:
    """Poisson arrivals for workers with these step times, each with 8 places at once."""

    steps_s: Sequence[float]  # of each worker
    load: float  # of what all can do together, prompts included
    shortest: int = 5  # tokens of an answer, all lengths up to `longest` alike
    longest: int = 35
    num_requests: int = 400
    are_lengths_known: bool = True  # False: each is expected to be as long as the mean
    seed: int = 3

    @property
    def mean(self) -> float:
        return (self.shortest + self.longest) / 2

    @property
    def rate(self) -> float:
        """Requests a second."""
        prompt_s = PROMPT_TOKENS / PREFILL_TOKENS_S
        return self.load * sum(1 / (self.mean * s / 8 + prompt_s) for s in self.steps_s)

    def run(self, policy: Policy, goal_s: float | None = None) -> list[float]:
        """Seconds from arrival to the last token of each answer, in rising order."""
        random.seed(self.seed)  # power of two draws from the module's generator
        return sorted(run_virtually(self._run(policy, goal_s)))

    async def _run(self, policy: Policy, goal_s: float | None) -> list[float]:
        links = [PacedLink(f"w{n}", s, max_waiting=5000) for n, s in enumerate(self.steps_s)]
        workers = {link.worker_id: Worker.of(link, await link.describe()) for link in links}
        line = Line(workers, Limits(max_queued=100_000))
        rng, loop = random.Random(self.seed), asyncio.get_running_loop()
        tasks: list[asyncio.Task[float]] = []
        for number in range(self.num_requests):
            length = rng.randint(self.shortest, self.longest)
            ask = Ask(
                needs=Needs(),
                num_prompt=PROMPT_TOKENS,
                num_answer=length if self.are_lengths_known else round(self.mean),
                rules=RoutingRules(policy=policy),
                doubt=0.0 if self.are_lengths_known else DOUBT,
                due_s=None if goal_s is None else loop.time() + goal_s,
            )
            tasks.append(asyncio.create_task(answer(line, ask, str(number), length)))
            await asyncio.sleep(rng.expovariate(self.rate))
        return await asyncio.gather(*tasks)


async def answer(line: Line, ask: Ask, name: str, num_tokens: int, priority: int = 0) -> float:
    """Place one answer and run it to its end; seconds from arrival to the last token."""
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    job = await line.place(ask, priority=priority, arrived_s=start_s)
    sampling = SamplingParams(max_tokens=num_tokens)
    prompt = tuple(4 + n for n in range(ask.num_prompt))
    request = Request(id=name, prompt_ids=prompt, sampling=sampling)
    try:
        async for output in job.worker.link.generate(request):
            job.received(len(output.token_ids))
    finally:
        job.end()
        line.changed()
    return loop.time() - start_s
