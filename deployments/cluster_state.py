"""What a Ray tells a process that has not joined it: its nodes, and whether we run there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

REPLICA = "SERVE_REPLICA::"  # Serve names its actors so, then APP#DEPLOYMENT#ID


class ClusterState:
    """The tables of a Ray's head, read from there alone.

    Joining would take longer: the first driver on a node waits until Ray has started a worker
    process for each CPU, and it needs a node on this machine.
    """

    def __init__(self, gcs_address: str) -> None:
        """Nothing is asked yet. `gcs_address`: HOST:PORT of the head."""
        from ray._private.state import GlobalState
        from ray._raylet import GcsClientOptions  # pyright: ignore[reportAttributeAccessIssue]

        self.gcs_address = gcs_address
        self._tables = GlobalState()
        self._tables._initialize_global_state(
            GcsClientOptions.create(
                gcs_address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False
            )
        )

    def nodes(self) -> Sequence[Mapping[str, Any]]:  # as `ray.nodes()` gives them
        """All nodes, dead ones too. Like all here raises RaySystemError where nobody answers, or
        only to another token.
        """
        return self._tables.node_table()

    def free(self) -> Mapping[str, Mapping[str, float]]:
        """What each node has left, by its id."""
        return self._tables.available_resources_per_node()

    def autoscaler_groups(self) -> Sequence[Any]:  # NodeGroupConfig of Ray's autoscaler.proto
        """Node types that the autoscaler told of."""
        config = self._tables.get_cluster_config()
        return config.node_group_configs if config is not None else ()

    def runs(self, application: str) -> bool:
        """Whether Serve has a replica of this application there."""
        alive = self._tables.actor_table(None, actor_state_name="ALIVE")
        return any(actor["Name"].startswith(f"{REPLICA}{application}#") for actor in alive.values())
