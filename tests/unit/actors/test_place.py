"""A worker says where it is, and runs no more threads than Ray gave it CPUs."""

from __future__ import annotations

from pathlib import Path

from polypath.actors.place import Place
from polypath.actors.worker import Worker
from polypath.runtime.config import EngineConfig
from polypath.tests.tiny_models import random


def test_what_ray_gave_is_in_the_description_and_in_the_plan(tmp_path: Path) -> None:
    random(tmp_path / "tiny")
    place = Place(pool="t4", node_id="a1", address="10.0.0.7", labels={"zone": "b"}, num_cpus=0.5)
    worker = Worker(EngineConfig(model=str(tmp_path / "tiny"), self_check=False), place)
    worker.start()
    try:
        said = worker.describe()
    finally:
        worker.stop()
    assert (said["pool"], said["node_id"], said["node_address"]) == ("t4", "a1", "10.0.0.7")
    assert (said["labels"], said["num_cpus"]) == ({"zone": "b"}, 0.5)
    assert isinstance(said["plan"], dict) and said["plan"]["num_threads"] == 1


def test_without_ray_a_worker_is_of_the_default_pool() -> None:
    assert Place().to_json()["pool"] == "default"
