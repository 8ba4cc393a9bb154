"""API keys: made here, hashed here, and compared in a time that tells nothing of them."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence

from .auth_config import KeyConfig

PREFIX = "pp-"  # so that people and scanners of leaked secrets recognise one
NUM_BYTES = 32  # of chance: one fast hash is enough, since nobody can guess what is hashed


def new_key() -> str:
    """A key that nobody can guess."""
    return PREFIX + secrets.token_urlsafe(NUM_BYTES)


def hash_key(key: str) -> str:
    """What a config may hold of a key: its SHA-256 in hex."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


class KeyRing:
    """All keys that a server accepts."""

    def __init__(self, keys: Sequence[KeyConfig]) -> None:
        self._keys = [(bytes.fromhex(key.hash), key) for key in keys]

    def find(self, presented: str) -> KeyConfig | None:
        """The key that was presented; compares with every one, found or not."""
        digest = hashlib.sha256(presented.encode("utf-8", "surrogateescape")).digest()
        found: KeyConfig | None = None
        for expected, key in self._keys:
            if hmac.compare_digest(digest, expected):
                found = key
        return found
