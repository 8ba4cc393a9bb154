"""Keeps a gateway's list of workers true: every replica of a pool, over a road where it offers one.

Serve's router says who is there (replicas.py). A worker is dropped the moment its connection ends,
which is sooner than Serve notices; one that leaves gets nothing new and keeps what it has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from ..actors.handle_link import HandleLink, link_errors
from ..actors.link import WorkerLink
from ..actors.road_address import RoadAddress
from ..actors.road_link import RoadLink
from ..runtime.errors import EngineError
from .gateway import Gateway
from .replicas import BOARD, Replica, ReplicaBoard

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger("polypath.roster")

FIRST_PAUSE_S, LAST_PAUSE_S = 0.2, 2.0  # between tries to reach a worker
ROAD_TRIES = 3  # then the handle serves, and the road is tried again now and then
ROAD_AGAIN_S = 30.0
WATCH_S = 1.0  # a worker behind a handle is asked so often whether it is there
ASK_LIMIT_S = 5.0


class Road(WorkerLink, Protocol):
    """A link that can tell when its worker leaves, as `RoadLink`."""

    async def leaving(self) -> str:
        """Wait until the worker takes nothing new, or is gone; why."""
        ...

    async def gone(self) -> str:
        """Wait until the connection is over; why."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...


class Links(Protocol):
    """Makes links to one replica; tests put their own in."""

    def has_road(self, replica: Replica) -> bool:
        """Whether it offers one."""
        ...

    async def road(self, replica: Replica) -> Road:
        """Raises EngineError when none can be had."""
        ...

    def handle(self, replica: Replica) -> WorkerLink:
        """What always is there."""
        ...


class ServeLinks:
    """Links to the replicas of a Serve deployment."""

    def __init__(self, handle: DeploymentHandle, gateway: str) -> None:
        self._handle = handle
        self._gateway = gateway

    def has_road(self, replica: Replica) -> bool:
        return replica.metadata.get("road") is not None

    async def road(self, replica: Replica) -> RoadLink:
        offer = replica.metadata.get("road")
        if offer is None:
            raise EngineError("it offers no road")
        return await RoadLink.connect(RoadAddress.from_json(offer), self._gateway)

    def handle(self, replica: Replica) -> WorkerLink:
        return HandleLink(self._handle, replica.id)


async def follow(gateway: Gateway, handle: DeploymentHandle) -> None:
    """Until cancelled: every replica behind `handle` is a worker of the gateway."""
    deployment = str(handle.deployment_id)
    polling = asyncio.ensure_future(poll(handle, deployment, BOARD))
    try:
        await Roster(gateway, ServeLinks(handle, gateway.id)).run(deployment, BOARD)
    finally:
        polling.cancel()


async def poll(handle: DeploymentHandle, deployment: str, board: ReplicaBoard) -> None:
    """A handle's router starts at the first call, so make one; should the router tell nothing even
    when replicas answer, then what they answer, once a second.
    """
    is_told = False
    while True:
        try:
            answers = await handle.broadcast("offer").results_async(timeout_s=ASK_LIMIT_S)
        except (TimeoutError, *link_errors()):
            answers = []  # nobody is there yet, or one died while it was asked
        if answers and not is_told and board.knows(deployment):
            return
        if answers and not is_told:
            is_told = True
            logger.warning("Serve's router does not say who serves %s: asking instead", deployment)
        if is_told:
            board.publish(deployment, tuple(Replica(a["replica"], a) for a in answers))
        await asyncio.sleep(WATCH_S)


class Roster:
    """The replicas of one deployment; a task for each."""

    def __init__(self, gateway: Gateway, links: Links) -> None:
        self._gateway = gateway
        self._links = links
        self._visits: dict[str, ReplicaVisit] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, deployment: str, board: ReplicaBoard) -> None:
        """Follow the board until cancelled."""
        loop = asyncio.get_running_loop()

        def on_change(replicas: tuple[Replica, ...]) -> None:  # on any thread
            if not loop.is_closed():
                loop.call_soon_threadsafe(self.update, replicas)

        unwatch = board.watch(deployment, on_change)
        try:
            await loop.create_future()
        finally:
            unwatch()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def update(self, replicas: tuple[Replica, ...]) -> None:
        """Begin with those that are new; send nothing more to those that are not listed."""
        listed = {replica.id: replica for replica in replicas}
        for name in self._visits.keys() - listed.keys():
            self._visits.pop(name).unlist()
        for name in listed.keys() - self._visits.keys():
            visit = ReplicaVisit(self._gateway, self._links, listed[name])
            self._visits[name] = visit
            task = asyncio.create_task(visit.run(), name=f"replica {name}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


class ReplicaVisit:
    """One replica for as long as Serve lists it, and its streams for as long as they run."""

    def __init__(self, gateway: Gateway, links: Links, replica: Replica) -> None:
        self._gateway = gateway
        self._links = links
        self._replica = replica
        self._unlisted = asyncio.Event()

    def unlist(self) -> None:
        """Serve has taken it out: nothing new for it."""
        self._unlisted.set()

    async def run(self) -> None:
        """Reach it, again and again, until it is no longer listed."""
        failures, pause_s = 0, FIRST_PAUSE_S
        while not self._unlisted.is_set():
            try:
                await self._by_road()
                failures, pause_s = 0, FIRST_PAUSE_S
            except EngineError as error:
                failures += 1
                if failures >= ROAD_TRIES or not self._links.has_road(self._replica):
                    await self._by_handle(error)
            await self._pause(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    async def _by_road(self) -> None:
        """Use the road until it ends. Raises EngineError when it cannot be had."""
        link = await self._links.road(self._replica)
        try:
            worker = await self._gateway.add_worker(link)
            logger.info("%s is reached by a road", worker.id)
            await self._until_unlisted(link.leaving())
            self._gateway.remove_worker(worker.id)
            logger.info("%s gets nothing new: %s", worker.id, await link.gone())
        finally:
            link.close()

    async def _by_handle(self, why: EngineError) -> None:
        """Use the handle until the worker does not answer, or its road can be had after all."""
        link = self._links.handle(self._replica)
        try:
            async with asyncio.timeout(ASK_LIMIT_S):
                worker = await self._gateway.add_worker(link)
        except (EngineError, TimeoutError) as error:
            logger.warning("replica %s cannot be reached: %s; %s", self._replica.id, why, error)
            return
        logger.warning("%s is reached by Serve's handle, which costs more: %s", worker.id, why)
        again_s = ROAD_AGAIN_S
        while await self._answers(link):
            await self._pause(WATCH_S)
            again_s -= WATCH_S
            if again_s <= 0 and self._links.has_road(self._replica):
                return  # the worker stays known, and the next link takes its place
        self._gateway.remove_worker(worker.id)

    async def _answers(self, link: WorkerLink) -> bool:
        if self._unlisted.is_set():
            return False
        try:
            async with asyncio.timeout(ASK_LIMIT_S):
                await link.stats()
        except (EngineError, TimeoutError):
            return False
        return True

    async def _pause(self, seconds: float) -> None:
        await self._until_unlisted(asyncio.sleep(seconds))

    async def _until_unlisted(self, work: Coroutine[Any, Any, object]) -> None:
        """Until `work` ends or the replica is no longer listed."""
        tasks = [asyncio.ensure_future(work), asyncio.ensure_future(self._unlisted.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
