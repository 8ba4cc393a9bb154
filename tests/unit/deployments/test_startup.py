"""The worker's start is told as one record: the last event of each stage, in order."""

from __future__ import annotations

from polypath.deployments.startup import StartupRecord, StartupReporter
from polypath.runtime.startup import StartupEvent


class Store:
    """Stands in for Ray's key-value store."""

    def __init__(self) -> None:
        self.record = StartupRecord()

    def write(self, key: str, record: StartupRecord) -> None:
        self.record = record


def reporter(store: Store) -> StartupReporter:
    return StartupReporter("key", write=store.write)


def test_a_stage_keeps_its_last_event() -> None:
    store = Store()
    report = reporter(store)
    report(StartupEvent(stage="weights", message="a", fraction=0.5))
    report(StartupEvent(stage="weights", message="a", fraction=1.0, seconds=2.0))
    report(StartupEvent(stage="ready", message="worker-1", fraction=1.0, seconds=3.0))
    assert [event["stage"] for event in store.record.events] == ["weights", "ready"]
    assert store.record.events[0]["seconds"] == 2.0
    assert store.record.is_ready


def test_a_new_process_has_a_record_of_its_own() -> None:
    store = Store()
    reporter(store)(StartupEvent(stage="ready", message="worker-1"))
    first = store.record
    reporter(store)
    assert not store.record.is_ready
    assert first.is_ready and first.began_at <= store.record.began_at


def test_a_failure_is_one_sentence() -> None:
    store = Store()
    reporter(store).failed("the model's files are missing")
    assert store.record.failure == "the model's files are missing"
