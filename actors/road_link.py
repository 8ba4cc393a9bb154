"""A `WorkerLink` over a road: one connection to a worker that all requests of a gateway share."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from typing import Any

from ..runtime.errors import EngineError
from ..runtime.request import Request, RequestOutput
from .gateway_end import GatewayEnd
from .load import WorkerLoad
from .road_address import RoadAddress
from .road_end import Pulse


class RoadLink:
    """A worker at the other end of a road. `connect` makes one."""

    kind = "road"

    def __init__(self, end: GatewayEnd) -> None:
        self._end = end

    @classmethod
    async def connect(
        cls, address: RoadAddress, gateway: str, pulse: Pulse | None = None
    ) -> RoadLink:
        """Connect and prove knowledge of the key, and have the worker do the same. Raises
        EngineError.
        """
        failures: list[str] = []
        for family, where in address.socket_choices():
            try:
                return cls(await _connect(family, where, address, gateway, pulse or Pulse()))
            except (OSError, EngineError) as error:
                failures.append(str(error))
        reasons = "; ".join(failures) or "it listens on another machine's own socket only"
        raise EngineError(f"the worker's road cannot be reached: {reasons}")

    @property
    def worker_id(self) -> str:
        """Who is at the other end."""
        return self._end.worker

    @property
    def num_late(self) -> int:
        """Outputs that came after their attempt had been closed here."""
        return self._end.num_late

    async def leaving(self) -> str:
        """Wait until the worker takes nothing new, or is gone; why."""
        await self._end.is_leaving.wait()
        return self._end.why

    async def gone(self) -> str:
        """Wait until the connection is over; why."""
        await self._end.is_gone.wait()
        return self._end.why

    def close(self) -> None:
        """End the connection; what still runs over it fails here and is freed there."""
        self._end.drop("the gateway closed the connection")

    async def describe(self) -> dict[str, Any]:  # JSON
        return await self._end.ask("describe")

    async def stats(self) -> dict[str, Any]:  # JSON
        return await self._end.ask("stats")

    def load(self) -> WorkerLoad | None:
        return self._end.load

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        attempt = self._end.submit(request)
        try:
            while True:
                output = await attempt.next()
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self._end.abandon(attempt)

    async def cancel(self, request_id: str) -> None:
        self._end.cancel(request_id)

    async def hold(self, is_held: bool) -> None:
        await self._end.ask("hold" if is_held else "release")


async def _connect(
    family: socket.AddressFamily,
    where: Any,  # an address of the family
    address: RoadAddress,
    gateway: str,
    pulse: Pulse,
) -> GatewayEnd:
    loop = asyncio.get_running_loop()
    end = GatewayEnd(bytes.fromhex(address.key), gateway, pulse)
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setblocking(False)
    try:
        async with asyncio.timeout(pulse.greeting_s):
            await loop.sock_connect(made, where)
            if family == socket.AF_UNIX:
                await loop.create_unix_connection(lambda: end, sock=made)
            else:
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await loop.create_connection(lambda: end, sock=made)
    except (OSError, TimeoutError) as error:
        made.close()
        raise EngineError(str(error) or "no answer in time") from None
    await end.is_greeted.wait()
    if end.is_gone.is_set():
        raise EngineError(end.why)
    return end
