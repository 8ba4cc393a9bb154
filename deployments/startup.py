"""How workers tell whoever started them how far they are: small records in Ray's key-value store.

The store is there before any replica is, costs no process, and is reached from every node of a
cluster.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..runtime.startup import StartupEvent

_NAMESPACE = "polypath"


@dataclass(kw_only=True, slots=True)
class StartupRecord:
    """What is known of a worker's start: the last event of each stage, in order."""

    pid: int = 0
    began_at: float = 0.0  # seconds since 1970: the order of records
    events: list[dict[str, Any]] = field(default_factory=list)  # stage, message, fraction, seconds
    failure: str | None = None  # one sentence, when the start failed

    @property
    def is_ready(self) -> bool:
        return any(event["stage"] == "ready" for event in self.events)


def read_all(prefix: str) -> list[StartupRecord]:
    """The records of every process that began under this prefix, oldest first. One more than there
    are workers means that a worker died.
    """
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list

    keys = _internal_kv_list(prefix, namespace=_NAMESPACE)
    found = (_internal_kv_get(key, namespace=_NAMESPACE) for key in keys)
    records = [StartupRecord(**json.loads(text)) for text in found if text]
    return sorted(records, key=lambda record: record.began_at)


def write(key: str, record: StartupRecord) -> None:
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(key, json.dumps(asdict(record)).encode(), True, namespace=_NAMESPACE)


class StartupReporter:
    """The worker's end: give it to the engine as `on_progress`."""

    def __init__(
        self,
        key: str,
        *,
        write: Callable[[str, StartupRecord], None] = write,
    ) -> None:
        self._key = key
        self._write = write
        self._record = StartupRecord(pid=os.getpid(), began_at=time.time())
        self._publish()

    def __call__(self, event: StartupEvent) -> None:
        kept = [e for e in self._record.events if e["stage"] != event.stage]
        new = {
            "stage": str(event.stage),
            "message": event.message,
            "fraction": event.fraction,
            "seconds": event.seconds,
        }
        self._record.events = [*kept, new]
        self._publish()

    def failed(self, sentence: str) -> None:
        self._record.failure = sentence
        self._publish()

    def _publish(self) -> None:
        self._write(self._key, self._record)
