"""How a worker tells whoever started it how far it is: a small record in Ray's own key-value store.

The store is there before any replica is, costs no process, and is reached from every node of a
cluster.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..runtime.startup import StartupEvent

_NAMESPACE = "polypath"


@dataclass(kw_only=True, slots=True)
class StartupRecord:
    """What is known of a worker's start: the last event of each stage, in order."""

    attempt: int = 0  # counts processes: 2 means that the first one died or failed
    pid: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)  # stage, message, fraction, seconds
    failure: str | None = None  # one sentence, when the start failed

    @property
    def is_ready(self) -> bool:
        return any(event["stage"] == "ready" for event in self.events)


def read(key: str) -> StartupRecord:
    """The record as it stands; empty while no worker process has begun."""
    from ray.experimental.internal_kv import _internal_kv_get

    found = _internal_kv_get(key, namespace=_NAMESPACE)
    return StartupRecord(**json.loads(found)) if found else StartupRecord()


def write(key: str, record: StartupRecord) -> None:
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(key, json.dumps(asdict(record)).encode(), True, namespace=_NAMESPACE)


class StartupReporter:
    """The worker's end: give it to the engine as `on_progress`."""

    def __init__(
        self,
        key: str,
        *,
        read: Callable[[str], StartupRecord] = read,
        write: Callable[[str, StartupRecord], None] = write,
    ) -> None:
        self._key = key
        self._write = write
        self._record = StartupRecord(attempt=read(key).attempt + 1, pid=os.getpid())
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
