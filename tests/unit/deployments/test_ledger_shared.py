"""Gateways that share a ledger, and what they do when it is lost: over a fake of Ray's handles."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from polypath.deployments import ledger_shared
from polypath.deployments.ledger import Excess, KeyLimits, Ledger, Standing
from polypath.deployments.ledger_shared import SharedLedger

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class FakeActor:
    """Calls go to a ledger at once, until it is dead."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.is_dead = False

    def __getattr__(self, method: str) -> Any:  # a handle's method
        return FakeMethod(self, method)

    def call(self, method: str, *args: Any) -> Any:  # whatever the ledger answers
        if self.is_dead:
            raise ActorDiedError
        answer = getattr(self.ledger, method)(*args)
        return self.ledger.num_gateways() if method == "renew" else answer


class FakeMethod:
    def __init__(self, actor: FakeActor, method: str) -> None:
        self._actor, self._method = actor, method

    def remote(self, *args: object) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        try:
            future.set_result(self._actor.call(self._method, *args))
        except ActorDiedError as error:
            future.set_exception(error)
            future.exception()  # as Ray's references: nobody has to look
        return future


class Cluster:
    """Where the gateways look for the actor."""

    def __init__(self) -> None:
        self.actor: FakeActor | None = FakeActor()
        self.gateways: list[SharedLedger] = []

    def connect(self) -> FakeActor:
        if self.actor is None:
            raise ValueError("no such actor")
        return self.actor

    async def gateway(self, name: str) -> SharedLedger:
        gateway = SharedLedger(name, self.connect)
        self.gateways.append(gateway)
        await gateway.start()
        return gateway

    def lose_actor(self) -> None:
        assert self.actor is not None
        self.actor.is_dead, self.actor = True, None


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    monkeypatch.setattr(ledger_shared, "RENEW_S", 0.02)
    monkeypatch.setattr(ledger_shared, "RETRY_S", 0.02)
    found = Cluster()
    yield found
    for gateway in found.gateways:
        gateway.close()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not is_so():
            await asyncio.sleep(0.01)


async def num_admitted(gateways: list[SharedLedger], limits: KeyLimits, count: int) -> int:
    """How many of `count` requests, in turn over the gateways, get in."""
    answers = [await gateways[n % len(gateways)].enter("k", limits) for n in range(count)]
    return sum(isinstance(answer, Standing) for answer in answers)


async def test_limits_hold_exactly_over_all_gateways(cluster: Cluster) -> None:
    gateways = [await cluster.gateway(name) for name in "abc"]
    assert await num_admitted(gateways, KeyLimits(requests_per_minute=10), 30) == 10


async def test_one_gateway_alone_may_take_all(cluster: Cluster) -> None:
    gateways = [await cluster.gateway(name) for name in "ab"]
    assert await num_admitted(gateways[:1], KeyLimits(max_concurrent=5), 20) == 5
    gateways[0].leave("k")
    assert await num_admitted(gateways[1:], KeyLimits(max_concurrent=5), 20) == 1


async def test_while_the_ledger_is_lost_each_keeps_to_its_share(cluster: Cluster) -> None:
    gateways = [await cluster.gateway(name) for name in "ab"]
    await until(lambda: all(gateway._num_gateways == 2 for gateway in gateways))
    cluster.lose_actor()
    assert await num_admitted(gateways, KeyLimits(requests_per_minute=10), 40) == 10
    held = await gateways[0].reserve("k", KeyLimits(tokens_per_minute=100), 51)
    assert isinstance(held, Excess)


async def test_a_new_ledger_is_told_what_runs(cluster: Cluster) -> None:
    gateways = [await cluster.gateway(name) for name in "ab"]
    limits = KeyLimits(max_concurrent=4)
    assert await num_admitted(gateways, limits, 3) == 3
    cluster.lose_actor()
    await gateways[0].standing("k")  # finds out
    await gateways[1].standing("k")
    cluster.actor = actor = FakeActor()
    await until(lambda: actor.ledger.standing("k").running == 3)
    assert await num_admitted(gateways, limits, 5) == 1
    for gateway, count in zip(gateways, (2, 1), strict=True):
        for _ in range(count):
            gateway.leave("k")
    assert actor.ledger.standing("k").running == 1


async def test_a_silent_ledger_is_a_lost_one(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_shared, "CALL_S", 0.05)
    gateway = await cluster.gateway("a")
    silent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(FakeMethod, "remote", lambda *_: silent)
    async with asyncio.timeout(2):
        assert await num_admitted([gateway], KeyLimits(requests_per_minute=3), 5) == 3
