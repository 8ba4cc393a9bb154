"""Serve's router for pools: tells this process which replicas there are, and obeys `to`.

Given to Serve by name (`ROUTER`); it is copied by value, so it must not hold state of ours.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    RequestRouter,
    RunningReplica,
)

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

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's list has changed."""
        super().update_replicas(replicas)
        # Not at the top: there it would be copied with this module.
        from .replicas import BOARD, Replica

        BOARD.publish(
            str(self._deployment_id),
            tuple(Replica(r.replica_id.unique_id, r.replica_metadata) for r in replicas),
        )
