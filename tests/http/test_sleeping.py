"""A model without a worker that can get one: requests are held, counted as demand, and answered."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from polypath.deployments.api_settings import ApiSettings
from polypath.deployments.autoscaling_pools import ScalingRules
from polypath.deployments.autoscaling_report import PoolView, decide, report
from polypath.deployments.fleet import FleetSpec, ModelSpec, PoolSpec
from polypath.deployments.gateway import Gateway
from polypath.deployments.routes import build_api
from polypath.runtime.checkpoint.source import Checkpoint
from polypath.runtime.config import EngineConfig
from polypath.tests.http.fakes import Call, FakeLink, client_of
from polypath.tests.paced import PacedLink

pytestmark = pytest.mark.anyio

BODY = {"prompt": "hello", "max_tokens": 3, "ignore_eos": True}


def sleeping(tiny: Checkpoint, wake_s: float = 30.0, stranded_s: float = 0.0) -> Gateway:
    gateway = Gateway(ApiSettings(stranded_s=stranded_s))
    gateway.add_checkpoint(tiny, name="tiny", wake_s=wake_s, max_model_len=64)
    return gateway


def fleet(tiny: Checkpoint) -> FleetSpec:
    engine = EngineConfig(model=str(tiny.path), served_model_name="tiny")
    pool = PoolSpec(name="p", engine=engine, num_workers=0, max_workers=2, price=3.0)
    model = ModelSpec(
        model=engine.model, name="tiny", engine=engine, pools=(pool,), scaling=ScalingRules()
    )
    return FleetSpec(models=(model,))


async def test_a_sleeping_model_is_well_and_says_so(tiny: Checkpoint) -> None:
    gateway = sleeping(tiny)
    async with client_of(gateway) as client:
        health = await client.get("/health")
        assert (health.status_code, health.json()["models"]) == (200, {"tiny": "asleep"})
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert (model["max_model_len"], model["workers"]) == (64, 0)
    gateway.close()


async def test_a_request_waits_for_the_worker_that_is_woken(tiny: Checkpoint) -> None:
    gateway = sleeping(tiny)
    async with client_of(gateway) as client:
        running = asyncio.create_task(client.post("/v1/completions", json=BODY))
        while not len(gateway.models["tiny"].line):
            await asyncio.sleep(0.01)
        numbers = report(fleet(tiny), gateway.models, asyncio.get_running_loop().time())
        assert numbers["model/0/unfinished"] == 1
        assert numbers["model/0/waiting_prompt"] >= 5
        assert numbers["model/0/arriving_new"] > 0
        assert numbers["pool/0/tiny.p/price"] == 3.0 and numbers["pool/0/tiny.p/ready"] == 0
        await gateway.add_worker(FakeLink())
        answer = await running
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3
    gateway.close()


async def test_it_is_given_up_after_twice_the_stated_cold_start(tiny: Checkpoint) -> None:
    gateway = sleeping(tiny, wake_s=0.1)
    async with client_of(gateway) as client:
        began_s = asyncio.get_running_loop().time()
        answer = await client.post("/v1/completions", json=BODY)
        took_s = asyncio.get_running_loop().time() - began_s
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert took_s >= 0.2
    gateway.close()


async def test_a_client_that_leaves_is_no_demand_any_more(tiny: Checkpoint) -> None:
    gateway = sleeping(tiny)
    running = Call(build_api(gateway), "POST", "/v1/completions", BODY | {"stream": True})
    while not len(gateway.models["tiny"].line):
        await asyncio.sleep(0.01)
    await running.leave()
    numbers = report(fleet(tiny), gateway.models, asyncio.get_running_loop().time())
    assert numbers["model/0/unfinished"] == 0 and numbers["model/0/waiting_new"] == 0
    gateway.close()


async def test_what_a_worker_was_like_holds_when_it_is_gone(tiny: Checkpoint) -> None:
    gateway = sleeping(tiny)
    worker = await gateway.add_worker(FakeLink())
    known = gateway.models["tiny"].max_model_len
    gateway.remove_worker(worker.id)
    assert gateway.models["tiny"].max_model_len == known == worker.max_model_len
    assert gateway.models["tiny"].capacity == worker.capacity
    gateway.close()


async def test_a_prompt_beyond_any_context_is_refused_without_waking(tiny: Checkpoint) -> None:
    gateway = sleeping(tiny)
    async with client_of(gateway) as client:
        answer = await client.post("/v1/completions", json=BODY | {"max_tokens": 100})
    assert answer.status_code == 400 and "the context holds 64" in answer.text
    gateway.close()


async def test_a_model_that_cannot_be_woken_answers_503_at_once(tiny: Checkpoint) -> None:
    gateway = Gateway()
    gateway.add_checkpoint(tiny, name="tiny")
    async with client_of(gateway) as client:
        assert (await client.post("/v1/completions", json=BODY)).status_code == 503
        assert (await client.get("/health")).status_code == 503
    gateway.close()


async def test_a_sleeping_pool_is_asked_for_what_the_awake_one_cannot_hold(
    tiny: Checkpoint,
) -> None:
    engine = EngineConfig(model=str(tiny.path), served_model_name="tiny", max_model_len=64)
    pools = tuple(
        PoolSpec(
            name=name, engine=replace(engine, max_model_len=most), num_workers=0, max_workers=1
        )
        for name, most in (("short", 64), ("long", 128))
    )
    model = ModelSpec(model=engine.model, name="tiny", engine=engine, pools=pools)
    specs = FleetSpec(models=(model,))
    gateway = Gateway()
    gateway.add_checkpoint(tiny, name="tiny", wake_s=30.0, max_model_len=128, pools=pools)
    await gateway.add_worker(PacedLink("s", pool="short", max_model_len=64))
    async with client_of(gateway) as client:
        assert (await client.get("/v1/models")).json()["data"][0]["max_model_len"] == 128
        refused = await client.post("/v1/completions", json=BODY | {"max_tokens": 200})
        assert refused.status_code == 400
        running = asyncio.create_task(
            client.post("/v1/completions", json=BODY | {"max_tokens": 100})
        )
        while not len(gateway.models["tiny"].line):
            await asyncio.sleep(0.01)
        numbers = report(specs, gateway.models, asyncio.get_running_loop().time())
        assert numbers["bound/0/tiny.long/unfinished"] == 1
        assert not [name for name in numbers if name.startswith("bound/0/tiny.short")]
        assert numbers["model/0/unfinished"] == numbers["model/0/waiting_new"] == 0
        views = {
            "tiny.short": PoolView(ready=1, target=1),
            "tiny.long": PoolView(ready=0, target=0),
        }
        assert decide([numbers], views, {}, 0.0)["0"].targets == {"tiny.short": 1, "tiny.long": 1}
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        long = await gateway.add_worker(
            PacedLink("l", pool="long", max_model_len=128, step_s=0.001)
        )
        answer = await running
        assert answer.status_code == 200 and answer.headers["x-polypath-worker"] == "l"
        gateway.remove_worker(long.id)
        headers = {"x-polypath-require": "worker=l"}
        gone = await client.post("/v1/completions", json=BODY, headers=headers)
        assert gone.status_code == 400 and "a name of its own" in gone.text
    gateway.close()


def test_the_report_is_numbers_alone(tiny: Checkpoint, tmp_path: Path) -> None:
    gateway = sleeping(tiny)
    numbers = report(fleet(tiny), gateway.models, 0.0)
    assert numbers and all(type(value) is float for value in numbers.values())
