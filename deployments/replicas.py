"""Which replicas of each deployment there are, as Serve's routers in this process are told.

A router is made by Serve, and its module is copied by value into each process: what it writes down
there, nobody else would see. So it writes it here, on whichever thread it runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica by Serve's id, and what it said of itself when it became ready."""

    id: str
    metadata: dict[str, Any]  # JSON


OnChange = Callable[[tuple[Replica, ...]], None]


class ReplicaBoard:
    """Replicas by deployment. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lists: dict[str, tuple[Replica, ...]] = {}
        self._watchers: dict[str, list[OnChange]] = {}

    def publish(self, deployment: str, replicas: tuple[Replica, ...]) -> None:
        """These and no others are running; tells the watchers, on this thread."""
        with self._lock:
            self._lists[deployment] = replicas
            watchers = list(self._watchers.get(deployment, ()))
        for watcher in watchers:
            watcher(replicas)

    def knows(self, deployment: str) -> bool:
        """Whether anything was ever published of it."""
        with self._lock:
            return deployment in self._lists

    def watch(self, deployment: str, on_change: OnChange) -> Callable[[], None]:
        """Call `on_change` now, if something is known, and at each change, on any thread. Returns
        what ends it.
        """
        with self._lock:
            self._watchers.setdefault(deployment, []).append(on_change)
            known = self._lists.get(deployment)
        if known is not None:
            on_change(known)
        return lambda: self._unwatch(deployment, on_change)

    def _unwatch(self, deployment: str, on_change: OnChange) -> None:
        with self._lock:
            self._watchers[deployment].remove(on_change)


BOARD = ReplicaBoard()  # of this process
