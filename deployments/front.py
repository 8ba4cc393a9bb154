"""The gateway's own HTTP server, beside Serve: no proxy stands between it and the client.

Serve's Python proxy costs several times what all the rest of a streamed token does
(docs/serving.md). Several gateways on one machine share the port.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvicorn

from ..runtime.errors import EngineError
from .proxy import CleanHeaders
from .tls import TlsFiles

if TYPE_CHECKING:
    from starlette.types import ASGIApp

KEEP_ALIVE_S = 95  # clients keep idle connections for up to 90 s
BACKLOG = 2048
OPEN_LIMIT_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontAddress:
    """Where the gateway listens itself. `host` is an IP address of the node `node_id`."""

    host: str
    port: int
    node_id: str  # Ray's
    tls: TlsFiles | None = None


class FrontDoor:
    """Serves an app on a socket of its own, on the loop that opens it."""

    def __init__(self, app: ASGIApp, address: FrontAddress) -> None:
        self._address = address
        self._server = _Server(
            uvicorn.Config(
                CleanHeaders(app),
                lifespan="off",
                ws="none",
                log_config=None,  # the process's own
                log_level=logging.WARNING,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                ssl_certfile=address.tls.cert if address.tls else None,
                ssl_keyfile=address.tls.key if address.tls else None,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Listen; returns when clients are served. Raises EngineError."""
        listening = _listen(self._address)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        async with asyncio.timeout(OPEN_LIMIT_S):
            while not self._server.started and not self._serving.done():
                await asyncio.sleep(0.01)
        if why := self.why_closed():
            raise EngineError(why)

    def why_closed(self) -> str | None:
        """Why nobody is served any more, or None."""
        if self._serving is None or not self._serving.done():
            return None
        if self._serving.cancelled():
            return "the gateway's HTTP server was cancelled"
        return f"the gateway's HTTP server ended: {self._serving.exception()}"

    async def close(self, limit_s: float) -> None:
        """Take no new connections, and let answers under way end within `limit_s` seconds."""
        if self._serving is None:
            return
        self._server.config.timeout_graceful_shutdown = max(1, int(limit_s))
        self._server.should_exit = True
        await asyncio.wait({self._serving}, timeout=limit_s + 1.0)


class _Server(uvicorn.Server):
    """One that leaves the process's signals to Ray."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(address: FrontAddress) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, address.host != "::")
        made.bind((address.host, address.port))
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise EngineError(
            f"cannot listen on {address.host} port {address.port}: {error.strerror}; "
            "another program took it after it had been found free"
        ) from error
    return made
