"""The port is looked at before anything loads; what is wrong with it is one sentence."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from polypath.deployments import listen
from polypath.runtime.errors import ConfigurationError


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that something listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_port_zero_becomes_a_free_port() -> None:
    host, port = listen.claim("127.0.0.1", 0)
    assert host == "127.0.0.1"
    assert port > 0
    with socket.socket() as free:
        free.bind((host, port))


def test_a_free_port_is_none_that_a_program_gets_by_asking_for_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds before a gateway listened, one of Ray's processes had got its port."""
    given = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(listen, "GIVEN_PORTS", given)
    for text, first in (("40000\t60999\n", 40000), ("1024\t65535\n", 32768), ("", 32768)):
        given.write_text(text)
        found = {listen.claim("127.0.0.1", 0)[1] for _ in range(20)}
        assert len(found) > 10 and all(20000 <= port < first for port in found)
    monkeypatch.setattr(listen, "GIVEN_PORTS", tmp_path / "none")
    assert listen.claim("127.0.0.1", 0)[1] < 32768


def test_where_no_such_port_is_free_any_port_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = listen._try_bind

    def refuse(family: socket.AddressFamily, ip: str, port: int, host: str) -> int:
        if port:
            raise ConfigurationError(f"{port} is taken")
        return bind(family, ip, port, host)

    monkeypatch.setattr(listen, "_try_bind", refuse)
    assert listen._quiet_port(socket.AF_INET, "127.0.0.1", "127.0.0.1") == 0


def test_a_taken_port_names_address_port_and_process(taken: int) -> None:
    with pytest.raises(ConfigurationError) as caught:
        listen.claim("127.0.0.1", taken)
    assert f"127.0.0.1:{taken} is taken by" in str(caught.value)
    assert "--port" in str(caught.value)
    assert "(process " in str(caught.value)


def test_a_port_taken_on_one_address_is_taken_for_all_addresses(taken: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"0\.0\.0\.0:{taken} is taken"):
        listen.claim("0.0.0.0", taken)


def test_a_bound_port_that_shares_is_still_taken() -> None:
    with socket.socket() as sharing:
        sharing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sharing.bind(("127.0.0.1", 0))
        sharing.listen()
        with pytest.raises(ConfigurationError, match="is taken"):
            listen.claim("127.0.0.1", sharing.getsockname()[1])


def test_a_port_in_time_wait_is_free() -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # the side that closes first waits
        client.close()
    assert listen.claim("127.0.0.1", port) == ("127.0.0.1", port)


def test_localhost_means_the_address_we_print() -> None:
    host, _ = listen.claim("localhost", 0)
    assert host == "127.0.0.1"


def test_a_name_without_an_address_is_said_so() -> None:
    with pytest.raises(ConfigurationError, match=r"no-such-host\.invalid does not resolve"):
        listen.claim("no-such-host.invalid", 0)


def test_a_foreign_address_is_said_so() -> None:
    with pytest.raises(
        ConfigurationError, match=r"192\.0\.2\.77 is not an address of this machine"
    ):
        listen.claim("192.0.2.77", 0)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("192.0.2.7", "http://192.0.2.7:80"),
    ],
)
def test_the_printed_url_can_be_used(host: str, url: str) -> None:
    assert listen.url(host, 80) == url


def test_ipv6_is_listened_on_where_the_machine_has_it() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    host, port = listen.claim("[::1]", 0)
    assert host == "::1"
    with socket.socket(socket.AF_INET6) as other:
        other.bind(("::1", port))
        other.listen()
        with pytest.raises(ConfigurationError, match=rf"\[::1\]:{port} is taken"):
            listen.claim("::1", port)
        warning = listen.warning("127.0.0.1", port)
        assert warning is not None and "use 127.0.0.1 and not localhost" in warning
