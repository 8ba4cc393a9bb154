"""Find out before anything loads whether the API can listen where the user wants it to."""

from __future__ import annotations

import errno
import ipaddress
import os
import random
import socket
from pathlib import Path

from ..runtime.errors import ConfigurationError

GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
USUAL_FIRST = 32768  # of that range on Linux
ABOVE_RAY = 20000  # Ray's workers listen on 10002 to 19999
TRIES = 30


def claim(host: str, port: int) -> tuple[str, int]:
    """The IP address and port to listen on for what the user wrote; port 0 becomes a free one.

    Every address that `host` means is bound once and let go, so that a port that is taken,
    forbidden or not ours
    raises ConfigurationError now, and not after the model has loaded.
    """
    addresses = _resolve(host, port)
    port = port or _quiet_port(*addresses[0], host)
    for family, ip in addresses:
        port = _try_bind(family, ip, port, host)
    return addresses[0][1], port


def url(host: str, port: int, *, is_tls: bool = False) -> str:
    """What to type into a client: brackets round IPv6, loopback for "all addresses"."""
    ip = ipaddress.ip_address(host)
    if ip.is_unspecified:
        ip = ipaddress.ip_address("127.0.0.1" if ip.version == 4 else "::1")
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{ip}]:{port}" if ip.version == 6 else f"{scheme}://{ip}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an IP address."""
    return ipaddress.ip_address(host).is_loopback


def warning(host: str, port: int) -> str | None:
    """A sentence when another program answers `localhost` on the kind of address that we do not
    listen on.
    """
    if host != "127.0.0.1":
        return None
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.2)
        try:
            probe.connect(("::1", port))
        except OSError:
            return None
    return (
        f"{_owner(port)} listens on [::1]:{port}; use 127.0.0.1 and not localhost to reach Polypath"
    )


def _resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    """IPv4 first: that is what we print. IPv6 addresses of a name count only where this machine has
    IPv6.
    """
    bare = host.removeprefix("[").removesuffix("]")
    try:
        found = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigurationError(
            f"--host {host} does not resolve to an address ({error}); use 127.0.0.1 or an "
            "address of this machine"
        ) from None
    addresses = dict.fromkeys((family, str(where[0])) for family, _, _, _, where in found)
    ordered = sorted(addresses, key=lambda address: address[0] != socket.AF_INET)
    return [a for a in ordered if a == ordered[0] or _has_address(*a)]


def _has_address(family: socket.AddressFamily, ip: str) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((ip, 0))
    except OSError:
        return False
    return True


def _try_bind(family: socket.AddressFamily, ip: str, port: int, host: str) -> int:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As Serve's proxy does; a port whose last connection is closing counts as free then.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, ip != "::")
            probe.bind((ip, port))
            probe.listen(1)  # two sockets may bind with SO_REUSEADDR, but only one may listen
            return int(probe.getsockname()[1])
    except OSError as error:
        raise ConfigurationError(_bind_sentence(error, ip, port, host)) from None


def _quiet_port(family: socket.AddressFamily, ip: str, host: str) -> int:
    """A free port that the system gives to nobody who asks for any: seconds pass before we listen,
    and Ray's processes ask for dozens meanwhile. 0, any at all, where there is none.
    """
    for port in random.sample(range(ABOVE_RAY, _first_given_port()), TRIES):
        try:
            return _try_bind(family, ip, port, host)
        except ConfigurationError:
            continue
    return 0


def _first_given_port() -> int:
    """Where the range begins that the system gives away from."""
    try:
        low = int(GIVEN_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        low = USUAL_FIRST
    return low if low >= ABOVE_RAY + TRIES else USUAL_FIRST


def _bind_sentence(error: OSError, ip: str, port: int, host: str) -> str:
    where = f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
    if error.errno == errno.EADDRINUSE:
        return (
            f"{where} is taken by {_owner(port)}; stop it, or choose another port with "
            "--port (0 picks a free one)"
        )
    if error.errno == errno.EACCES:
        return (
            f"{where}: this user may not listen on ports below 1024; choose a higher one "
            "with --port"
        )
    if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        return (
            f"--host {host}: {ip} is not an address of this machine; use 127.0.0.1, "
            "0.0.0.0 or one of its own"
        )
    return f"cannot listen on {where}: {os.strerror(error.errno or 0)}"


def _owner(port: int) -> str:
    """Which process listens on the port, as far as this user may know."""
    import psutil

    try:
        found = [
            connection
            for connection in psutil.net_connections(kind="tcp")
            if connection.status == psutil.CONN_LISTEN
            and connection.laddr
            and connection.laddr.port == port
        ]
        if not found:
            return "a connection that is still closing (this takes up to a minute)"
        pid = found[0].pid
        return f"{psutil.Process(pid).name()} (process {pid})" if pid else "another process"
    except psutil.Error:
        return "another process"
