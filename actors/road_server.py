"""The worker's end of its roads: who may come, and when all must go."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING

from .frames import Farewell
from .road_address import RoadAddress, listen
from .road_connection import RoadConnection
from .road_end import Pulse

if TYPE_CHECKING:
    from .worker import Worker

logger = logging.getLogger("polypath.road")

MAX_STRANGERS = 32  # connections that have proved nothing yet


class RoadServer:
    """Listens for gateways and lets those that know the key use the worker."""

    def __init__(self, worker: Worker, pulse: Pulse | None = None) -> None:
        self.worker = worker
        self.pulse = pulse or Pulse()
        self.is_draining = False
        self._address: RoadAddress | None = None
        self._servers: list[asyncio.Server] = []
        self._strangers: dict[RoadConnection, None] = {}  # in the order of their coming
        self._gateways: dict[RoadConnection, None] = {}

    async def start(self, host: str | None = None) -> RoadAddress:
        """Listen: on this machine, and on the IP address `host` if given. Returns what to offer."""
        self._address, sockets = listen(host)
        for listening in sockets:
            self._servers.append(await self._serve(listening))
        self.worker.listen(self._after_step)
        return self._address

    async def _serve(self, listening: socket.socket) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        if listening.family == socket.AF_UNIX:
            return await loop.create_unix_server(self._meet, sock=listening)
        return await loop.create_server(self._meet, sock=listening)

    def _meet(self) -> RoadConnection:
        connection = RoadConnection(self)
        self._strangers[connection] = None
        if len(self._strangers) > MAX_STRANGERS:
            next(iter(self._strangers)).drop(f"over {MAX_STRANGERS} connections without a proof")
        return connection

    @property
    def key(self) -> bytes:
        """What a gateway must prove to know."""
        assert self._address is not None, "the server has been started"
        return bytes.fromhex(self._address.key)

    def admit(self, connection: RoadConnection) -> None:
        """A stranger has proved itself."""
        self._strangers.pop(connection, None)
        self._gateways[connection] = None
        logger.info("gateway %s is connected", connection.gateway)

    def forget(self, connection: RoadConnection, why: str) -> None:
        """A connection is over."""
        if connection in self._gateways:
            del self._gateways[connection]
            logger.info("gateway %s is gone: %s", connection.gateway, why)
        else:
            self._strangers.pop(connection, None)
            logger.warning("a connection to the road was refused: %s", why)

    def _after_step(self) -> None:
        load = self.worker.load()
        for connection in self._gateways:
            connection.flush(load)

    def hold(self, is_held: bool) -> dict[str, object]:
        """Let all gateways know at once whether they may send something new; nothing to answer."""
        self.worker.hold(is_held)
        for connection in self._gateways:
            connection.beat()
        return {}

    def num_open(self) -> int:
        """Attempts of all gateways that have not ended."""
        return sum(connection.num_open for connection in self._gateways)

    async def drain(self, limit_s: float) -> None:
        """Tell all gateways that the worker leaves, drain it, and close."""
        self.is_draining = True
        for connection in self._gateways:
            connection.send(Farewell())
        await self.worker.drain(limit_s)
        await self.close()

    async def close(self) -> None:
        """Close every connection and listen no more."""
        for server in self._servers:
            server.close()
        if self._servers:
            self.worker.unlisten(self._after_step)
        self._servers.clear()
        for connection in [*self._gateways, *self._strangers]:
            connection.close("the worker stops")
        await asyncio.sleep(0)  # `connection_lost` of those that had nothing left to send
