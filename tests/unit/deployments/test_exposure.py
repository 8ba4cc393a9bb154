"""What is said at start about who can reach the server."""

from __future__ import annotations

import pytest

from polypath.deployments.auth_config import AuthConfig
from polypath.deployments.exposure import exposure_notes
from polypath.deployments.keys import hash_key
from polypath.deployments.listen import url

USER = {"name": "user", "hash": hash_key("1")}
BOSS = {"name": "boss", "hash": hash_key("2"), "role": "admin"}


@pytest.mark.parametrize(
    ("keys", "host", "is_tls", "said"),
    [
        ([], "127.0.0.1", False, []),
        ([], "::1", False, []),
        ([USER], "127.0.0.1", False, []),
        ([], "0.0.0.0", False, ["no API key is configured"]),
        ([], "::", True, ["no API key is configured"]),
        ([USER], "10.0.0.1", True, ["no admin key"]),
        ([USER, BOSS], "10.0.0.1", False, ["unencrypted"]),
        ([USER, BOSS], "10.0.0.1", True, []),
    ],
)
def test_notes(keys: list[dict[str, str]], host: str, is_tls: bool, said: list[str]) -> None:
    auth = AuthConfig.model_validate({"keys": keys})
    notes = list(exposure_notes(auth, host, is_tls=is_tls))
    assert len(notes) == len(said)
    assert all(word in note for word, note in zip(said, notes, strict=True))


def test_the_url_of_a_server_with_a_certificate_is_https() -> None:
    assert url("::", 8443, is_tls=True) == "https://[::1]:8443"
