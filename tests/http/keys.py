"""Servers with API keys, for tests."""

from __future__ import annotations

from typing import Any

import httpx

from polypath.deployments.auth_config import AuthConfig, KeyConfig
from polypath.deployments.gateway import Gateway
from polypath.deployments.keys import hash_key
from polypath.deployments.ledger_link import LedgerLink
from polypath.deployments.routes import build_api
from polypath.tests.http.fakes import app_client

USER, OTHER, ADMIN = "pp-user-key", "pp-other-key", "pp-admin-key"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


def auth_of(**limits: Any) -> AuthConfig:  # fields of KeyConfig, for the user's key
    """An inference key with these limits, another without any, and an admin key."""
    return AuthConfig(
        keys=(
            KeyConfig(name="user", hash=hash_key(USER), **limits),
            KeyConfig(name="other", hash=hash_key(OTHER)),
            KeyConfig.model_validate({"name": "boss", "hash": hash_key(ADMIN), "role": "admin"}),
        )
    )


def keyed_client(
    gateway: Gateway,
    key: str | None = USER,
    *,
    auth: AuthConfig | None = None,
    ledger: LedgerLink | None = None,
) -> httpx.AsyncClient:
    """A client with this key, of a server that asks for one."""
    client = app_client(build_api(gateway, auth or auth_of(), ledger))
    if key is not None:
        client.headers["Authorization"] = f"Bearer {key}"
    return client
