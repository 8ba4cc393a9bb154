"""Serve's router for pools: tells this process which replicas there are, and obeys `to`.

Given to Serve by name (`ROUTER`); it is copied by value, so it must not hold state of ours.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ray.exceptions import RayError
from ray.serve.request_router import (
    PendingRequest,
    RequestRouter,
    RunningReplica,
)

AGAIN_S = 0.5
ROUTER = "polypath.deployments.replica_router:ReplicaRouter"


class ReplicaRouter(RequestRouter):
    """The replica that a call names by its keyword `to`; for any other call, all of them."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Groups of replicas, best first. One that is gone falls to the others, who refuse it."""
        to: Any = pending_request.kwargs.get("to") if pending_request is not None else None
        meant = [r for r in candidate_replicas if to and r.replica_id.unique_id == to]
        return [meant or candidate_replicas]

    def initialize_state(self, **options: object) -> None:
        """Serve's constructor for what is ours."""
        from .head_calls import HeadCalls

        self._head = HeadCalls("replicas", limit_s=None)
        self._listed: list[Any] | None = None  # RunningReplicaInfo: the newest list not looked at
        self._found: dict[Any, RunningReplica] = {}  # by ReplicaID: looked up, not yet in use
        self._looking: asyncio.Task[None] | None = None

    def _update_running_replicas(self, running_replicas: list[Any]) -> None:
        """Serve finds the actor of each new replica by asking Ray's head, and waits for its answer
        on this loop, where all requests are answered too. So that is done on another thread first.
        """
        self._listed = running_replicas
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._look_up())

    async def _look_up(self) -> None:
        """One list after another; of those that came meanwhile the last."""
        try:
            while (listed := self._listed) is not None:
                self._listed = None
                for info in listed:
                    if info.replica_id not in self.curr_replicas:
                        await self._find(info)
                if self._listed is None:
                    super()._update_running_replicas(listed)
                    self._found.clear()
        finally:
            self._looking = None

    async def _find(self, info: Any) -> None:  # RunningReplicaInfo
        make = super().create_replica_wrapper
        while info.replica_id not in self._found:
            try:
                self._found[info.replica_id] = await self._head.ask(make, info)
            except ValueError:
                return  # it is dead: asked once more, and left out with a warning
            except RayError:
                await asyncio.sleep(AGAIN_S)  # the head is away; without it nothing changes

    def create_replica_wrapper(self, replica_info: Any) -> RunningReplica:
        """What was found."""
        found = self._found.pop(replica_info.replica_id, None)
        return found or super().create_replica_wrapper(replica_info)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's list has changed."""
        super().update_replicas(replicas)
        # Not at the top: there it would be copied with this module.
        from .replicas import BOARD, Replica

        BOARD.publish(
            str(self._deployment_id),
            tuple(Replica(r.replica_id.unique_id, r.replica_metadata) for r in replicas),
        )
