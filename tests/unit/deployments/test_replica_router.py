"""Serve's list of replicas reaches the gateway without holding up its loop, over fakes of Ray."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RaySystemError

from polypath.deployments.replicas import BOARD, Replica

# Serve's own, on import
pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
SLOW_S = 0.2


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def deployment() -> Any:  # DeploymentID
    from ray.serve._private.common import DeploymentID

    return DeploymentID("pool", "router-test")


def info(name: str) -> Any:  # as RunningReplicaInfo
    from ray.serve._private.common import ReplicaID

    return SimpleNamespace(replica_id=ReplicaID(name, deployment()))


async def queue_len(*, deadline_s: float) -> int:
    return 0


class SlowHead:
    """Ray's head: it takes its time to say which actor a replica is."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.dead: set[str] = set()
        self.is_away = 0  # for so many questions

    def wrapper(self, replica: Any) -> Any:  # as RunningReplica
        name = replica.replica_id.unique_id
        self.asked.append(name)
        time.sleep(SLOW_S)
        if self.is_away:
            self.is_away -= 1
            raise RaySystemError("the head is away")
        if name in self.dead:
            raise ValueError("no such actor")
        return SimpleNamespace(
            replica_id=replica.replica_id,
            replica_metadata={"name": name},
            node_id="n",
            availability_zone=None,
            multiplexed_model_ids=set(),
            max_ongoing_requests=8,
            update_replica_info=lambda _: None,
            get_queue_len=queue_len,
        )


def router_of(head: SlowHead) -> Any:  # ReplicaRouter
    from ray.serve._private.common import DeploymentHandleSource

    from polypath.deployments.replica_router import ReplicaRouter

    router = ReplicaRouter(
        deployment(),
        DeploymentHandleSource.REPLICA,
        create_replica_wrapper_func=head.wrapper,
    )
    router.initialize_state()
    return router


async def listed(names: set[str], limit_s: float = 10.0) -> int:
    """Wait until these are on the board; how often the loop turned meanwhile."""
    num_turns, deadline_s = 0, time.monotonic() + limit_s
    known: list[tuple[Replica, ...]] = []
    unwatch = BOARD.watch(str(deployment()), known.append)
    while not known or {replica.id for replica in known[-1]} != names:
        await asyncio.sleep(0.002)
        num_turns += 1
        assert time.monotonic() < deadline_s, known
    unwatch()
    return num_turns


async def test_a_slow_head_does_not_hold_up_the_loop() -> None:
    head = SlowHead()
    router = router_of(head)
    router._update_running_replicas([info("a"), info("b")])
    assert await listed({"a", "b"}) > 10
    assert head.asked == ["a", "b"]
    router._update_running_replicas([info("b"), info("c")])
    assert await listed({"b", "c"}) > 5
    assert head.asked == ["a", "b", "c"], "what is known is not asked for again"


async def test_of_lists_that_come_while_one_is_looked_up_the_last_holds() -> None:
    router = router_of(SlowHead())
    router._update_running_replicas([info("old")])
    await asyncio.sleep(SLOW_S / 3)
    router._update_running_replicas([info("older"), info("new")])
    router._update_running_replicas([info("new")])
    await listed({"new"})
    assert {replica.unique_id for replica in router.curr_replicas} == {"new"}


async def test_a_head_that_is_away_for_a_moment_loses_no_list() -> None:
    head = SlowHead()
    head.is_away = 1
    router = router_of(head)
    router._update_running_replicas([info("late")])
    await listed({"late"})


async def test_one_that_died_meanwhile_is_left_out() -> None:
    head = SlowHead()
    head.dead = {"dead"}
    router = router_of(head)
    router._update_running_replicas([info("alive"), info("dead")])
    await listed({"alive"})
