"""The gateway's list of workers follows Serve's list of replicas, and each worker's own signs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from polypath.actors.load import WorkerLoad
from polypath.deployments import roster
from polypath.deployments.replicas import Replica, ReplicaBoard
from polypath.deployments.roster import Roster
from polypath.runtime.errors import EngineError
from polypath.runtime.request import Request, RequestOutput

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "FIRST_PAUSE_S", 0.005)
    monkeypatch.setattr(roster, "LAST_PAUSE_S", 0.01)
    monkeypatch.setattr(roster, "WATCH_S", 0.01)


class FakeRoad:
    """Its worker leaves and goes when the test says so."""

    kind = "road"

    def __init__(self, worker_id: str, kind: str = "road") -> None:
        self.worker_id = worker_id
        self.kind = kind
        self.is_leaving = asyncio.Event()
        self.is_gone = asyncio.Event()
        self.is_closed = False

    async def leaving(self) -> str:
        await self.is_leaving.wait()
        return "it leaves"

    async def gone(self) -> str:
        await self.is_gone.wait()
        return "it is gone"

    def close(self) -> None:
        self.is_closed = True

    async def describe(self) -> dict[str, Any]:
        return {"worker_id": self.worker_id}

    async def stats(self) -> dict[str, Any]:
        if self.is_gone.is_set():
            raise EngineError("gone")
        return {"worker_id": self.worker_id}

    def load(self) -> WorkerLoad | None:
        return None

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        raise EngineError("this one serves nobody")
        yield

    async def hold(self, is_held: bool) -> None:
        raise EngineError("nobody holds it")

    async def cancel(self, request_id: str) -> None:
        return


class FakeLinks:
    """What there is to reach; `no_road` names replicas whose road cannot be had."""

    def __init__(self) -> None:
        self.roads: dict[str, FakeRoad] = {}
        self.handles: dict[str, FakeRoad] = {}
        self.no_road: set[str] = set()
        self.num_tries = 0

    def has_road(self, replica: Replica) -> bool:
        return replica.metadata.get("road") is not None

    async def road(self, replica: Replica) -> FakeRoad:
        self.num_tries += 1
        if replica.id in self.no_road or not self.has_road(replica):
            raise EngineError("no road")
        self.roads[replica.id] = FakeRoad(f"worker-{replica.id}")
        return self.roads[replica.id]

    def handle(self, replica: Replica) -> FakeRoad:
        self.handles[replica.id] = FakeRoad(f"worker-{replica.id}", "handle")
        return self.handles[replica.id]


class FakeGateway:
    """Remembers who is in, and by what."""

    def __init__(self) -> None:
        self.workers: dict[str, str] = {}

    async def add_worker(self, link: FakeRoad) -> Any:  # something with an id
        self.workers[link.worker_id] = link.kind
        return type("Added", (), {"id": link.worker_id})

    def remove_worker(self, worker_id: str) -> None:
        self.workers.pop(worker_id, None)


class Scene:
    """A roster at work on a board of one deployment, `d`."""

    def __init__(self) -> None:
        self.board = ReplicaBoard()
        self.links = FakeLinks()
        self.gateway = FakeGateway()
        made = Roster(self.gateway, self.links)  # type: ignore[arg-type]  # stand-ins
        self.task = asyncio.ensure_future(made.run("d", self.board))

    def lists(self, *names: str, has_road: bool = True) -> None:
        offer = {"port": 1} if has_road else None
        self.board.publish("d", tuple(Replica(name, {"road": offer}) for name in names))

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not holds():
                await asyncio.sleep(0.002)

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class Told:
    """A handle whose replicas answer for themselves; `says` holds answers and what is raised."""

    def __init__(self, *says: list[dict[str, Any]] | Exception) -> None:
        self._says = list(says)

    def broadcast(self, method: str) -> Told:
        assert method == "offer"
        return self

    async def results_async(self, timeout_s: float) -> list[dict[str, Any]]:
        said = self._says.pop(0) if len(self._says) > 1 else self._says[0]
        if isinstance(said, Exception):
            raise said
        return said


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Serve's, on import
async def test_replicas_that_serves_router_keeps_silent_about_are_asked_whatever_befalls_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from ray.exceptions import ActorDiedError
    from ray.serve.exceptions import RayServeException

    both = [{"replica": "a"}, {"replica": "b"}]
    handle = Told(RayServeException(), both, ActorDiedError(), TimeoutError(), [{"replica": "b"}])
    board, seen = ReplicaBoard(), list[tuple[str, ...]]()
    board.watch("d", lambda replicas: seen.append(tuple(each.id for each in replicas)))
    polling = asyncio.ensure_future(roster.poll(handle, "d", board))  # type: ignore[arg-type]
    async with asyncio.timeout(5):
        while ("b",) not in seen:
            assert not polling.done(), polling.exception()
            await asyncio.sleep(0.002)
    assert seen[0] == ("a", "b") and "asking instead" in caplog.text
    polling.cancel()


async def test_every_replica_is_a_worker() -> None:
    scene = Scene()
    scene.lists("a", "b")
    await scene.until(lambda: scene.gateway.workers == {"worker-a": "road", "worker-b": "road"})
    scene.lists("a", "b", "c")
    await scene.until(lambda: len(scene.gateway.workers) == 3)
    await scene.end()
    assert all(road.is_closed for road in scene.links.roads.values())


async def test_a_replica_that_is_no_longer_listed_gets_nothing_new_and_keeps_its_streams() -> None:
    scene = Scene()
    scene.lists("a", "b")
    await scene.until(lambda: len(scene.gateway.workers) == 2)
    scene.lists("b")
    await scene.until(lambda: list(scene.gateway.workers) == ["worker-b"])
    await asyncio.sleep(0.05)
    assert not scene.links.roads["a"].is_closed
    scene.links.roads["a"].is_gone.set()
    await scene.until(lambda: scene.links.roads["a"].is_closed)
    await scene.end()


async def test_a_worker_that_says_it_leaves_gets_nothing_new() -> None:
    scene = Scene()
    scene.lists("a")
    await scene.until(lambda: "worker-a" in scene.gateway.workers)
    scene.links.roads["a"].is_leaving.set()
    await scene.until(lambda: not scene.gateway.workers)
    assert not scene.links.roads["a"].is_closed
    await scene.end()


async def test_a_worker_whose_connection_broke_is_reached_again() -> None:
    scene = Scene()
    scene.lists("a")
    await scene.until(lambda: "worker-a" in scene.gateway.workers)
    first = scene.links.roads["a"]
    first.is_gone.set()
    first.is_leaving.set()
    await scene.until(lambda: scene.links.roads["a"] is not first)
    await scene.until(lambda: scene.gateway.workers == {"worker-a": "road"})
    await scene.end()


async def test_where_no_road_can_be_had_the_handle_serves_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Scene()
    scene.links.no_road.add("a")
    scene.lists("a")
    await scene.until(lambda: scene.gateway.workers == {"worker-a": "handle"})
    assert scene.links.num_tries == roster.ROAD_TRIES
    assert "worker-a is reached by Serve's handle, which costs more: no road" in caplog.text
    scene.links.handles["a"].is_gone.set()
    await scene.until(lambda: not scene.gateway.workers)
    await scene.end()


async def test_the_road_is_taken_when_it_can_be_had_after_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(roster, "ROAD_AGAIN_S", 0.05)
    scene = Scene()
    scene.links.no_road.add("a")
    scene.lists("a")
    await scene.until(lambda: scene.gateway.workers == {"worker-a": "handle"})
    scene.links.no_road.clear()
    await scene.until(lambda: scene.gateway.workers == {"worker-a": "road"})
    await scene.end()


async def test_a_worker_that_offers_no_road_is_not_asked_for_one_again() -> None:
    scene = Scene()
    scene.lists("a", has_road=False)
    await scene.until(lambda: scene.gateway.workers == {"worker-a": "handle"})
    assert scene.links.num_tries == 1
    await scene.end()


def test_a_board_tells_late_watchers_what_it_knows() -> None:
    board, seen = ReplicaBoard(), []
    assert not board.knows("d")
    board.publish("d", (Replica("a", {}),))
    unwatch = board.watch("d", seen.append)
    unwatch()
    board.publish("d", ())
    assert seen == [(Replica("a", {}),)]
    assert board.knows("d") and not board.knows("e")
