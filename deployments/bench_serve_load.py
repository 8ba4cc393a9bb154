"""Sends requests in a closed loop of so many clients, or as they arrive by chance (Poisson)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import aiohttp

from .bench_serve_client import Sample, Target, ask
from .bench_serve_prompts import Prompts


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """One point of a measurement: how many requests, how they come, how long they are."""

    concurrency: int | None = None  # a closed loop of so many clients; or
    rate: float | None = None  # requests a second, whatever the server does
    num_requests: int = 32
    prompt_tokens: int = 128
    new_tokens: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        assert (self.concurrency is None) != (self.rate is None), "one of the two kinds of load"

    @property
    def name(self) -> str:
        """How tables and plots call it."""
        if self.concurrency is not None:
            return f"{self.concurrency} at once"
        return f"{self.rate:g} a second"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadRun:
    """What came of one load."""

    load: Load
    samples: tuple[Sample, ...]
    wall_s: float  # from the first request's time to the last one's end
    cpu_share: float  # of one core, taken by this generator: near 1 it measures itself


async def run_load(
    session: aiohttp.ClientSession,
    target: Target,
    prompts: Prompts,
    load: Load,
    on_sample: Callable[[Sample], None] = lambda _: None,
) -> LoadRun:
    """All requests of one load, to their end."""
    # Seeded with the load's name too: a second load must not find the first one's prompts cached.
    texts = [
        prompts.text(load.prompt_tokens, f"{load.seed} {load.name} {number}")
        for number in range(load.num_requests)
    ]

    async def send(number: int, due_s: float) -> Sample:
        sample = await ask(session, target, texts[number], load.new_tokens, due_s)
        on_sample(sample)
        return sample

    began_s, cpu_s = time.monotonic(), time.process_time()
    samples = await (_closed(load, send) if load.rate is None else _open(load, load.rate, send))
    wall_s = max(sample.end_s for sample in samples) - min(sample.due_s for sample in samples)
    cpu_share = (time.process_time() - cpu_s) / max(1e-9, time.monotonic() - began_s)
    return LoadRun(load=load, samples=tuple(samples), wall_s=wall_s, cpu_share=cpu_share)


Send = Callable[[int, float], Coroutine[Any, Any, Sample]]


async def _closed(load: Load, send: Send) -> list[Sample]:
    """Each client asks again as soon as it has its answer."""
    numbers = iter(range(load.num_requests))
    samples: list[Sample] = []

    async def client() -> None:
        for number in numbers:
            samples.append(await send(number, time.monotonic()))

    num_clients = min(load.concurrency or 1, load.num_requests)
    await asyncio.gather(*(client() for _ in range(num_clients)))
    return samples


async def _open(load: Load, rate: float, send: Send) -> list[Sample]:
    """Requests come at times drawn beforehand, however many are still running."""
    rng = random.Random(load.seed)
    due_s, tasks = time.monotonic(), list[asyncio.Task[Sample]]()
    for number in range(load.num_requests):
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        tasks.append(asyncio.create_task(send(number, due_s)))
        due_s += rng.expovariate(rate)
    return await asyncio.gather(*tasks)
