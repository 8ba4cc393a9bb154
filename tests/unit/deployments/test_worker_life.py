"""How far pools are, and what is said when workers die and come back."""

from __future__ import annotations

from typing import Any

from polypath.deployments.pool_start import PoolStart
from polypath.deployments.startup import StartupRecord
from polypath.deployments.worker_life import WorkerLife


def record(pid: int, *stages: str, failure: str | None = None) -> StartupRecord:
    events: list[dict[str, Any]] = [{"stage": stage} for stage in stages]
    return StartupRecord(pid=pid, events=events, failure=failure)


def pool(*records: StartupRecord, num_workers: int = 2, title: str = "pool a") -> PoolStart:
    return PoolStart(title=title, num_workers=num_workers, records=list(records))


def test_a_pool_counts_its_workers() -> None:
    found = pool(record(1, "plan", "ready"), num_workers=3)
    assert (found.num_ready, found.num_missing, found.died_in, found.failure) == (1, 2, None, None)


def test_one_process_more_than_workers_means_that_one_died() -> None:
    assert pool(record(1, "weights"), record(2), record(3)).died_in == "weights"
    assert pool(record(1), record(2), record(3)).died_in == "its first lines"
    failed = pool(record(1, failure="no memory"), record(2))
    assert failed.failure == "no memory" and failed.died_in is None


def test_a_death_and_a_return_are_said_once_each() -> None:
    ready = (record(1, "ready"), record(2, "ready"))
    life = WorkerLife([pool(*ready), pool(record(9, "ready"), title="pool b")])
    looks = [
        pool(*ready),
        pool(*ready, record(3)),
        pool(*ready, record(3, "weights")),
        pool(*ready, record(3, "ready")),
        pool(*ready, record(3, "ready")),
    ]
    said = [list(life.changes([look])) for look in looks]
    back = "a worker of pool a is back (process 3)"
    assert said == [[], ["a worker of pool a died; a new one is starting"], [], [back], []]


def test_workers_of_a_pool_that_is_scaled_come_without_a_death() -> None:
    def look(*records: StartupRecord) -> PoolStart:
        return PoolStart(title="pool a", num_workers=0, records=list(records), is_elastic=True)

    life = WorkerLife([look()])
    looks = [look(record(1)), look(record(1, "ready")), look(record(1, "ready"), record(2))]
    said = [list(life.changes([each])) for each in looks]
    starting = "a worker of pool a is starting"
    assert said == [[starting], ["a worker of pool a is ready (process 1)"], [starting]]
    assert looks[-1].died_in is None


def test_a_worker_that_does_not_start_says_why_once() -> None:
    life = WorkerLife([pool()])
    failed = pool(record(1, failure="no memory"))
    said = [list(life.changes([each])) for each in (failed, failed)]
    assert said[0][-1] == "a worker of pool a did not start: no memory" and said[1] == []
