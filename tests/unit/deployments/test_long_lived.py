"""The garbage collector leaves alone what a start has made, and nothing else."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from polypath.deployments.long_lived import long_lived


class Node:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_nothing_is_collected_while_a_process_starts() -> None:
    with long_lived():
        assert not gc.isenabled()
        seen = weakref.ref(Node())
        for _ in range(10_000):
            Node()
        assert seen() is not None
    assert gc.isenabled()


def test_a_collection_looks_at_what_came_later_only() -> None:
    with long_lived():
        kept = [Node() for _ in range(1000)]
    assert gc.get_freeze_count() > len(kept)
    later = weakref.ref(Node())
    gc.collect()
    assert later() is None, "a request's garbage goes as before"


def test_a_start_that_fails_leaves_the_collector_as_it_was() -> None:
    before = gc.get_freeze_count()
    with pytest.raises(RuntimeError), long_lived():
        raise RuntimeError("no")
    assert gc.isenabled() and gc.get_freeze_count() == before
