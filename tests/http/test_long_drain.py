"""Streams of a whole minute while their workers leave: over real roads, with steps that sleep."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest

from polypath.actors.place import Place
from polypath.actors.road_link import RoadLink
from polypath.actors.road_server import RoadServer
from polypath.deployments.gateway import Gateway
from polypath.runtime.checkpoint.source import Checkpoint
from polypath.tests.http.live import live_server
from polypath.tests.paced_worker import PacedWorker

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

STEP_S, NUM_TOKENS = 0.2, 300
STREAM_S = STEP_S * NUM_TOKENS
SAYS = "abcdefgh"  # of every worker, over and over
WHOLE = "".join(SAYS[n % len(SAYS)] for n in range(NUM_TOKENS))
LIMITS_S = {"patient": 75.0, "hasty": 30.0, "staying": None}  # the real limit is 30 s


async def stream(url: str, pool: str) -> dict[str, Any]:
    """A minute's answer that begins on the worker of this pool."""
    body = {"model": "tiny", "prompt": "x", "max_tokens": NUM_TOKENS, "ignore_eos": True}
    found: dict[str, Any] = {"text": "", "pool": pool}
    began_s = time.monotonic()
    async with (
        httpx.AsyncClient(timeout=90, trust_env=False) as client,
        client.stream(
            "POST",
            f"{url}/v1/completions",
            json=body | {"stream": True},
            headers={"x-polypath-prefer": pool},
        ) as response,
    ):
        found["worker"] = response.headers["x-polypath-worker"]
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                found["text"] += "".join(choice["text"] for choice in chunk["choices"])
                found["polypath"] = chunk.get("polypath") or found.get("polypath")
            found["is_whole"] = line == "data: [DONE]" or found.get("is_whole", False)
    found["seconds"] = time.monotonic() - began_s
    return found


async def test_a_minutes_stream_ends_within_the_drain_limit_or_goes_on_elsewhere(
    tiny: Checkpoint,
) -> None:
    gateway = Gateway()
    gateway.add_checkpoint(tiny, name="tiny")
    workers: dict[str, PacedWorker] = {}
    roads: dict[str, RoadServer] = {}
    for pool in LIMITS_S:
        workers[pool] = PacedWorker(
            [4 + byte for byte in SAYS.encode()], STEP_S, place=Place(pool=pool)
        )
        workers[pool].start()
        roads[pool] = RoadServer(workers[pool])
        await gateway.add_worker(await RoadLink.connect(await roads[pool].start(), "gateway"))
    async with live_server(gateway) as url:
        asking = [asyncio.create_task(stream(url, pool)) for pool in ("patient", "hasty")]
        while not (workers["patient"].num_open() and workers["hasty"].num_open()):
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        leaving = [
            asyncio.create_task(roads[pool].drain(limit_s))
            for pool, limit_s in LIMITS_S.items()
            if limit_s is not None
        ]
        patient, hasty = await asyncio.gather(*asking)
        await asyncio.gather(*leaving)
    gateway.close()
    await roads["staying"].close()
    for pool, worker in workers.items():
        assert worker.num_open() == 0, pool
        worker.stop()
    for answer in (patient, hasty):
        assert answer["text"] == WHOLE, "no token twice, none missing"
        assert answer["is_whole"] and answer["seconds"] == pytest.approx(STREAM_S, abs=10)
        assert answer["worker"] == workers[answer["pool"]].worker_id
    assert not patient["polypath"].get("resumed")
    (moved,) = hasty["polypath"]["resumed"]
    assert moved["because"] == "it was drained"
    assert moved["from"] == workers["hasty"].worker_id
    assert moved["to"] == workers["staying"].worker_id
    assert moved["position"] == pytest.approx(31.0 / STEP_S, abs=5 / STEP_S)
