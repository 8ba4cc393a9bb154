"""Sentences about who can reach a server and what protects it, said once when it is ready."""

from __future__ import annotations

from collections.abc import Iterator

from . import listen
from .auth_config import AuthConfig, Role


def exposure_notes(auth: AuthConfig, host: str, *, is_tls: bool) -> Iterator[str]:
    """What an operator should know; nothing on loopback. `host` is an IP address."""
    if listen.is_loopback(host):
        return
    if auth.is_open:
        yield (
            f"no API key is configured and {host} is not loopback: whoever reaches the port may "
            "use the models and read /metrics and /v1/paths (`polypath key` makes a key)"
        )
    elif not any(key.role is Role.ADMIN for key in auth.keys):
        yield "no admin key is configured: nobody can read /metrics and /v1/paths"
    if not auth.is_open and not is_tls:
        yield (
            "keys and prompts cross the network unencrypted: give --tls-cert and --tls-key, or "
            "end TLS in front of it"
        )
