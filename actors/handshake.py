"""How both ends of a road prove that they know its key, without sending it.

The worker's key is random and new at each start; it is told only through Serve's replica metadata,
which Ray's token protects. Each side answers the other's fresh nonce with an HMAC-SHA256 over both
nonces, so that nothing overheard can be used again, and neither can be made to answer for the
other.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

KEY_BYTES = NONCE_BYTES = 32


def new_nonce() -> bytes:
    """Fresh randomness for one connection."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(key: bytes, role: str, worker_nonce: bytes, gateway_nonce: bytes) -> bytes:
    """What shows that `role` (`worker` or `gateway`) knows the key."""
    assert len(worker_nonce) == len(gateway_nonce) == NONCE_BYTES, "or two messages could be one"
    message = b"polypath road " + role.encode() + b"\0" + worker_nonce + gateway_nonce
    return hmac.new(key, message, hashlib.sha256).digest()


def is_proved(
    given: bytes, key: bytes, role: str, worker_nonce: bytes, gateway_nonce: bytes
) -> bool:
    """Compares in constant time; a nonce of another length proves nothing."""
    if len(worker_nonce) != NONCE_BYTES or len(gateway_nonce) != NONCE_BYTES:
        return False
    return hmac.compare_digest(given, proof(key, role, worker_nonce, gateway_nonce))
