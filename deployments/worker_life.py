"""Says in sentences when a worker of a running application died, and when one is back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .pool_start import PoolStart


class WorkerLife:
    """Compares each look at the workers' records with the one before."""

    def __init__(self, pools: Sequence[PoolStart]) -> None:
        self._known = {pool.title: _pids(pool) for pool in pools}
        self._starting: dict[str, set[int]] = {pool.title: set() for pool in pools}

    def changes(self, pools: Sequence[PoolStart]) -> Iterator[str]:
        """What has happened since the last look."""
        for pool in pools:
            new = _pids(pool) - self._known[pool.title]
            self._known[pool.title] |= new
            self._starting[pool.title] |= new
            if new:
                yield f"{_worker(pool)} {_why(pool)}"
            for record in pool.records:
                if record.failure is not None and record.pid in self._starting[pool.title]:
                    self._starting[pool.title].discard(record.pid)
                    yield f"{_worker(pool)} did not start: {record.failure}"
                if record.is_ready and record.pid in self._starting[pool.title]:
                    self._starting[pool.title].discard(record.pid)
                    verb = "is ready" if pool.is_elastic else "is back"
                    yield f"{_worker(pool)} {verb} (process {record.pid})"


def _why(pool: PoolStart) -> str:
    """A pool that is scaled starts workers for more than one reason."""
    return "is starting" if pool.is_elastic else "died; a new one is starting"


def _pids(pool: PoolStart) -> set[int]:
    return {record.pid for record in pool.records}


def _worker(pool: PoolStart) -> str:
    return f"a worker of {pool.title}" if pool.title.startswith("pool ") else pool.title
