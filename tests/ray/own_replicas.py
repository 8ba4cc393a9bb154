"""`polypath serve` with workers that do as a test says: dying at a stated moment, sick, or paced.

Run as a program it is the command line with these replicas in the place of the real ones:
`python -m polypath.tests.ray.own_replicas DyingReplica serve --config FILE`. Pools that are scaled
are built in another process, so for them only the applications below hold.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from polypath.actors.place import Place
from polypath.actors.worker import Worker
from polypath.deployments.pool import WorkerReplica
from polypath.runtime.config import EngineConfig
from polypath.runtime.planning.features import FEATURES
from polypath.runtime.request import RequestOutput
from polypath.tests.ray.labelled_cluster import MARKS

WELL_S = 2.0


class DyingReplica(WorkerReplica):
    """The real engine. With a file `first-chunk` there, the next worker whose step gave a request
    its first token takes the file away and dies, before any of that step has left its process.
    """

    def make_worker(self, config: EngineConfig, place: Place) -> Worker:
        worker = super().make_worker(config, place)
        mark = Path(os.environ[MARKS]) / "first-chunk"
        hand_over = worker._hand_over

        def die_or_hand_over(outputs: list[RequestOutput]) -> None:
            if any(output.position == 0 for output in outputs) and taken(mark):
                os.kill(os.getpid(), signal.SIGKILL)
            hand_over(outputs)

        worker._hand_over = die_or_hand_over  # type: ignore[method-assign]
        return worker


def taken(mark: Path) -> bool:
    """Whether this process was the one to remove it."""
    try:
        mark.unlink()
    except FileNotFoundError:
        return False
    return True


class PacedReplica(WorkerReplica):
    """Steps that sleep as long as the node's label `step_ms` says. It drains for a tenth of the
    time, so that streams of some seconds stand for some of a minute.
    """

    drain_s = WorkerReplica.drain_s / 10

    def make_worker(self, config: EngineConfig, place: Place) -> Worker:
        from polypath.tests.paced_worker import PacedWorker

        says = [4 + byte for byte in b"abcdefgh"]
        return PacedWorker(
            says,
            float(place.labels["step_ms"]) / 1000.0,
            model=config.served_model_name or "paced",
            max_num_seqs=config.max_num_seqs or 8,
            max_waiting=64,
            place=place,
            features=[name for name in FEATURES if name != place.labels.get("lacks")],
        )


class SickReplica(WorkerReplica):
    """The real engine, well when it becomes ready and for a moment after it, then not any more."""

    first_check_s: float | None = None

    def check_health(self) -> None:
        now_s = time.monotonic()
        if self.first_check_s is None:
            self.first_check_s = now_s
        if now_s - self.first_check_s > WELL_S:
            raise RuntimeError("the test says that it is sick")
        super().check_health()


def put_in_place(name: str) -> None:
    """From here on a worker's deployment is made of the replica class of this name."""
    from polypath.deployments import pool
    from polypath.tests.ray import own_replicas  # not `__main__`, which no other process knows

    pool.WorkerReplica = getattr(own_replicas, name)


def paced_app(args: dict[str, Any]) -> Any:  # Any: what Ray's config file holds; an Application
    """For Ray's own config file: `import_path: polypath.tests.ray.own_replicas:paced_app`."""
    put_in_place("PacedReplica")
    from polypath.deployments.app import app

    return app(args)


def sick_app(args: dict[str, Any]) -> Any:
    """The same with `SickReplica`."""
    put_in_place("SickReplica")
    from polypath.deployments.app import app

    return app(args)


if __name__ == "__main__":
    put_in_place(sys.argv.pop(1))
    from polypath.deployments.cli import main

    main()
