"""Certificate and key are tried before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from polypath.deployments.tls import check_tls
from polypath.runtime.errors import ConfigurationError
from polypath.tests.certificates import self_signed


def refusal(cert: Path | str | None, key: Path | str | None) -> str:
    """Why this pair is refused."""
    with pytest.raises(ConfigurationError) as caught:
        check_tls(cert and str(cert), key and str(key))
    return str(caught.value)


def test_a_pair_that_belongs_together_is_taken(tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path)
    files = check_tls(str(cert), str(key))
    assert files is not None
    assert (files.cert, files.key) == (str(cert), str(key))
    assert check_tls(None, None) is None


def test_one_alone_is_refused(tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path)
    assert refusal(cert, None).startswith("--tls-cert needs --tls-key")
    assert refusal(None, key).startswith("--tls-key needs --tls-cert")


def test_files_that_are_not_there_or_no_files(tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path)
    assert "No such file" in refusal(tmp_path / "no.crt", key)
    assert "Is a directory" in refusal(cert, tmp_path)


def test_what_is_no_pem_is_said(tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path)
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    for pair in ((empty, key), (cert, empty), (key, cert)):
        assert "no certificate and key in PEM form" in refusal(*pair)


def test_a_key_of_another_certificate(tmp_path: Path) -> None:
    cert, _ = self_signed(tmp_path)
    _, other = self_signed(tmp_path, name="other")
    assert "does not belong to" in refusal(cert, other)


def test_a_key_with_a_password_asks_nobody_at_start(tmp_path: Path) -> None:
    assert "is encrypted" in refusal(*self_signed(tmp_path, password="secret"))


@pytest.mark.parametrize(
    ("days", "word"), [((-9, -1), "certificate has expired"), ((1, 9), "not yet valid")]
)
def test_a_certificate_outside_its_days(tmp_path: Path, days: tuple[int, int], word: str) -> None:
    assert word in refusal(*self_signed(tmp_path, days=days))
