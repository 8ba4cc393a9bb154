"""How far the start of a pool, and of all of them, is."""

from __future__ import annotations

from dataclasses import dataclass

from .startup import StartupRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolStart:
    """How far one pool is: a record for each of its worker processes, oldest first."""

    title: str
    num_workers: int
    records: list[StartupRecord]
    is_elastic: bool = False  # more records may be more workers, and not one that died

    @property
    def num_ready(self) -> int:
        return sum(record.is_ready for record in self.records)

    @property
    def num_missing(self) -> int:
        """Workers whose process has not begun: they have no room, or their node is still coming."""
        return max(0, self.num_workers - len(self.records))

    @property
    def failure(self) -> str | None:
        """Why a worker did not start, in its own words."""
        return next((record.failure for record in self.records if record.failure), None)

    @property
    def died_in(self) -> str | None:
        """The stage in which a process ended without a word, since another took its place."""
        if self.is_elastic or len(self.records) <= self.num_workers:
            return None
        events = next((r.events for r in self.records if not r.is_ready), [])
        return str(events[-1]["stage"]) if events else "its first lines"


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """One look at a start: the workers' own records, and whether Serve and its proxies are up."""

    pools: list[PoolStart]
    is_serving: bool
    failure: str | None

    @property
    def is_ready(self) -> bool:
        """Whether every pool has all its workers."""
        return all(pool.num_ready >= pool.num_workers for pool in self.pools)
