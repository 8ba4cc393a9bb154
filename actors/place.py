"""Where a worker runs and what it was given there, as whoever started it says."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A worker's pool and node. Without Ray: the pool `default` and no node."""

    pool: str = "default"
    node_id: str = ""  # Ray's
    address: str = ""  # the node's, as Ray sees it
    labels: dict[str, str] = field(default_factory=dict)  # of the node
    num_cpus: float | None = None  # that Ray gave; None: nobody counts
    edition: str = ""  # of the pool's options, which tells workers before and after an update apart

    def to_json(self) -> dict[str, object]:
        """What `describe` says of it."""
        return {
            "pool": self.pool,
            "node_id": self.node_id,
            "node_address": self.address,
            "labels": dict(self.labels),
            "num_cpus": self.num_cpus,
            "edition": self.edition,
        }
