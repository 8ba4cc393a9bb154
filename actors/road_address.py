"""Where a worker's road is and how to prove that one was told: what its metadata offers.

On Linux every worker listens on a socket in the abstract namespace, which leaves no file behind and
cannot be reached from another machine; on a cluster also on its node's address.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..runtime.errors import EngineError
from .frames import VERSION
from .handshake import KEY_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class RoadAddress:
    """What a gateway needs to connect. Holds the key: never log or show it."""

    version: str
    key: str  # hexadecimal
    machine: str  # where `local` can be reached
    local: str | None  # name in the abstract socket namespace
    host: str | None
    port: int | None

    def to_json(self) -> dict[str, Any]:  # JSON
        """For the replica's metadata."""
        return asdict(self)

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> RoadAddress:  # JSON
        """Raises EngineError for an offer that this gateway cannot take."""
        if said.get("version") != VERSION:
            raise EngineError(
                f"the worker's road has version {said.get('version')}, this gateway's {VERSION}; "
                "update both to the same release"
            )
        return cls(**said)

    def socket_choices(self) -> list[tuple[socket.AddressFamily, Any]]:  # an address of the family
        """Ways to reach the worker from here, best first."""
        choices: list[tuple[socket.AddressFamily, Any]] = []
        if self.local is not None and self.machine == this_machine():
            choices.append((socket.AF_UNIX, "\0" + self.local))
        if self.host is not None:
            choices.append((_family(self.host), (self.host, self.port)))
        return choices


def listen(host: str | None) -> tuple[RoadAddress, list[socket.socket]]:
    """A new key, and sockets that listen: the local one, and one on the IP `host` if given.

    Raises OSError when `host` is not this machine's, ValueError when it means all addresses.
    """
    sockets: list[socket.socket] = []
    local: str | None = None
    if sys.platform == "linux":
        local = f"polypath-road-{secrets.token_hex(8)}"
        sockets.append(_listening(socket.AF_UNIX, "\0" + local))
    elif host is None:
        host = "127.0.0.1"
    port: int | None = None
    if host is not None:
        if ipaddress.ip_address(host).is_unspecified:
            raise ValueError(f"a road must not listen on all addresses ({host}); name one")
        sockets.append(_listening(_family(host), (host, 0)))
        port = int(sockets[-1].getsockname()[1])
    offer = RoadAddress(
        version=VERSION,
        key=secrets.token_hex(KEY_BYTES),
        machine=this_machine(),
        local=local,
        host=host,
        port=port,
    )
    return offer, sockets


def this_machine() -> str:
    """One name for all processes that see the same abstract sockets: boot and network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def _family(host: str) -> socket.AddressFamily:
    version = ipaddress.ip_address(host).version
    return socket.AF_INET if version == 4 else socket.AF_INET6


def _listening(family: socket.AddressFamily, address: Any) -> socket.socket:  # as `bind` takes it
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setblocking(False)
        made.bind(address)
        made.listen(64)
    except OSError:
        made.close()
        raise
    return made
