"""A gateway that starts anew knows of pools that sleep what the one before knew, and gateways tell
each other; what an update made untrue is forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from polypath.deployments.autoscaling_report import report
from polypath.deployments.fleet import FleetSpec, ModelSpec, PoolSpec
from polypath.deployments.gateway import Gateway
from polypath.deployments.pool_archive import FORGOTTEN_S, RENEW_S, PoolArchive, forget
from polypath.runtime.checkpoint.source import Checkpoint
from polypath.runtime.config import EngineConfig
from polypath.tests.http.fakes import client_of
from polypath.tests.paced import PacedLink

pytestmark = pytest.mark.anyio

BODY = {"prompt": "hello", "max_tokens": 3, "ignore_eos": True}
GRAPH = {"runner": "cpu_graph", "attention_backend": "paced", "ops": "paced"}
AS_GRAPH = {"x-polypath-require": "runner=cpu_graph"}  # the configuration does not settle it


class Texts:
    """Stands in for Ray's key-value store."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.num_writes = 0
        self.is_away = False

    def read(self, key: str) -> str | None:
        self._require_here()
        return self.texts.get(key)

    def write(self, key: str, text: str) -> None:
        self._require_here()
        self.num_writes += 1
        self.texts[key] = text

    def keys(self, prefix: str) -> list[str]:
        self._require_here()
        return [key for key in self.texts if key.startswith(prefix)]

    def delete(self, key: str) -> None:
        del self.texts[key]

    def _require_here(self) -> None:
        if self.is_away:
            raise RuntimeError("nobody answers")


class Site:
    """Gateways of one application, one after the other or side by side."""

    def __init__(self, tiny: Checkpoint) -> None:
        self._tiny = tiny
        self.store = Texts()
        self.now_s = 1000.0
        engine = EngineConfig(model=str(tiny.path), served_model_name="tiny")
        self.pools = tuple(
            PoolSpec(name=name, engine=engine, num_workers=0, max_workers=1, price=price)
            for name, price in (("plain", 1.0), ("graph", 5.0))
        )
        self.gateways: list[Gateway] = []

    async def gateway(self) -> tuple[Gateway, PoolArchive]:
        gateway = Gateway()
        gateway.add_checkpoint(self._tiny, name="tiny", wake_s=30.0, pools=self.pools)
        archive = PoolArchive("polypath", gateway.models, self.store, lambda: self.now_s)
        await archive.recall()
        self.gateways.append(gateway)
        return gateway, archive

    async def lived(self) -> None:
        """A gateway met a worker of each pool, and ended."""
        gateway, archive = await self.gateway()
        for link in self.links():
            await gateway.add_worker(link)
        await archive.keep()

    def links(self) -> list[PacedLink]:
        """A worker of each pool; the dear one's path has a graph and takes less."""
        plan = {"device": "cpu", "paths": {"decode": GRAPH}}
        plain, graph = (pool.edition for pool in self.pools)
        return [
            PacedLink("p", pool="plain", edition=plain),
            PacedLink("g", 0.002, pool="graph", edition=graph, plan=plan, max_model_len=100),
        ]

    def numbers(self, gateway: Gateway) -> dict[str, float]:
        model = ModelSpec(model="m", name="tiny", engine=self.pools[0].engine, pools=self.pools)
        now_s = asyncio.get_running_loop().time()
        return report(FleetSpec(models=(model,)), gateway.models, now_s)


@pytest.fixture
async def site(tiny: Checkpoint) -> AsyncIterator[Site]:
    found = Site(tiny)
    yield found
    for gateway in found.gateways:
        gateway.close()


async def pools_asked(site: Site, gateway: Gateway, headers: dict[str, str]) -> dict[str, float]:
    """Whose demand a request is that waits."""
    async with client_of(gateway) as client:
        waits = asyncio.create_task(client.post("/v1/completions", json=BODY, headers=headers))
        while not len(gateway.models["tiny"].line):
            await asyncio.sleep(0.01)
            assert not waits.done(), waits.result().text
        numbers = site.numbers(gateway)
        waits.cancel()
    return {name: value for name, value in numbers.items() if name.endswith("/unfinished")}


async def test_a_restarted_gateway_asks_the_pool_that_can_and_not_the_cheapest(site: Site) -> None:
    first, _ = await site.gateway()
    assert await pools_asked(site, first, AS_GRAPH) == {"model/0/unfinished": 1.0}, "who knows"
    await site.lived()
    again, _ = await site.gateway()
    assert not again.models["tiny"].workers
    found = await pools_asked(site, again, AS_GRAPH)
    assert found == {"model/0/unfinished": 0.0, "bound/0/tiny.graph/unfinished": 1.0}


async def test_it_refuses_what_no_pool_can_serve_without_waking_one(site: Site) -> None:
    await site.lived()
    gateway, _ = await site.gateway()
    async with client_of(gateway) as client:
        headers = {"x-polypath-require": "runner=cuda_graph"}
        answer = await client.post("/v1/completions", json=BODY, headers=headers)
        assert answer.status_code == 400 and "decode" not in answer.text
        assert "pool graph, without a worker now: runner is cpu_graph" in answer.text
        long = await client.post(
            "/v1/completions", json=BODY | {"max_tokens": 99}, headers=AS_GRAPH
        )
        assert long.status_code == 400 and "it holds 100 tokens of" in long.text


async def test_it_knows_how_fast_they_were(site: Site) -> None:
    await site.lived()
    gateway, _ = await site.gateway()
    assert site.numbers(gateway)["pool/0/tiny.graph/decode_tokens_s"] == pytest.approx(4000.0)
    assert site.numbers(gateway)["pool/0/tiny.plain/prefill_tokens_s"] == pytest.approx(10_000.0)


async def test_gateways_tell_each_other(site: Site) -> None:
    other, archive = await site.gateway()
    await site.lived()
    await archive.recall()
    found = await pools_asked(site, other, AS_GRAPH)
    assert found["bound/0/tiny.graph/unfinished"] == 1.0


async def test_what_it_has_met_itself_is_not_overwritten(site: Site) -> None:
    await site.lived()
    gateway, archive = await site.gateway()
    worker = await gateway.add_worker(PacedLink("new", pool="graph", max_model_len=300))
    await archive.recall()
    gateway.remove_worker(worker.id)
    assert {pool.context for pool in gateway.models["tiny"].pools} == {4096, 300}


async def test_changed_options_are_another_pool(site: Site) -> None:
    await site.lived()
    plain, graph = site.pools
    engine = replace(graph.engine, max_model_len=128)
    site.pools = (plain, replace(graph, engine=engine))
    gateway, _ = await site.gateway()
    memory = gateway.models["tiny"].pools[1]
    assert memory.last is None and memory.context == 128
    assert gateway.models["tiny"].pools[0].last is not None, "that one is as it was"


@pytest.mark.parametrize(
    "harmless", [{"price": 9.0}, {"max_workers": 4}, {"cold_start_s": 5.0}, {"where": "line 3"}]
)
def test_what_makes_no_other_worker_is_the_same_edition(harmless: dict[str, float]) -> None:
    pool = PoolSpec(engine=EngineConfig(model="/m"), num_cpus=1.0)
    assert replace(pool, **harmless).edition == pool.edition  # pyright: ignore[reportArgumentType]
    others = [replace(pool, num_cpus=2.0), replace(pool, label_selector={"a": "b"})]
    assert pool.edition not in {other.edition for other in others}


async def test_a_worker_that_an_update_leaves_behind_does_not_speak_for_its_pool(
    site: Site,
) -> None:
    old = site.links()[1]
    plain, graph = site.pools
    site.pools = (plain, replace(graph, engine=replace(graph.engine, max_model_len=128)))
    gateway, archive = await site.gateway()
    worker = await gateway.add_worker(old)
    gateway.remove_worker(worker.id)
    assert gateway.models["tiny"].pools[1].context == 128
    await archive.keep()
    assert not site.store.texts


async def test_what_nobody_renews_is_forgotten_and_swept_away(site: Site) -> None:
    await site.lived()
    site.now_s += FORGOTTEN_S
    gateway, archive = await site.gateway()
    assert all(pool.last is None for pool in gateway.models["tiny"].pools)
    await archive.start()
    archive.close()
    assert not site.store.texts


async def test_records_are_renewed_now_and_then_and_not_all_the_time(site: Site) -> None:
    gateway, archive = await site.gateway()
    for link in site.links():
        worker = await gateway.add_worker(link)
        gateway.remove_worker(worker.id)
    for _ in range(5):
        await archive.keep()
    assert site.store.num_writes == 2
    site.now_s += RENEW_S
    await archive.keep()
    assert site.store.num_writes == 4, "also of pools that sleep"


async def test_a_store_that_is_away_stops_nothing_and_gets_its_record_later(site: Site) -> None:
    site.store.is_away = True
    gateway, archive = await site.gateway()
    await archive.start()
    await gateway.add_worker(site.links()[0])
    await archive.keep()
    site.store.is_away = False
    await archive.keep()
    archive.close()
    assert len(site.store.texts) == 1


async def test_an_application_that_is_taken_down_leaves_nothing(site: Site) -> None:
    await site.lived()
    forget("another", site.store)
    assert len(site.store.texts) == 2
    forget("polypath", site.store)
    assert not site.store.texts
