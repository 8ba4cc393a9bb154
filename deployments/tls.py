"""A certificate and its key for HTTPS, tried out before anything starts.

The gateway's own server (front.py) ends TLS.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from ..runtime.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsFiles:
    """Absolute paths of PEM files; the certificate comes first in its chain."""

    cert: str
    key: str

    def client_context(self) -> ssl.SSLContext:
        """Trusts this very certificate, under any name: for our own look at our own server."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(cafile=self.cert)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # no issuer needed above it
        return context


def check_tls(cert: str | None, key: str | None) -> TlsFiles | None:
    """The pair of files, if both were given and serve a client. Raises ConfigurationError."""
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        missing, given = (
            ("--tls-cert", "--tls-key") if cert is None else ("--tls-key", "--tls-cert")
        )
        raise ConfigurationError(f"{given} needs {missing} beside it: HTTPS takes both")
    files = TlsFiles(cert=_readable(cert, "--tls-cert"), key=_readable(key, "--tls-key"))
    _shake_hands(files)
    return files


def _readable(name: str, option: str) -> str:
    path = Path(name).expanduser()
    try:
        path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{option} {name}: {error.strerror}") from None
    return str(path.resolve())


def _server_context(files: TlsFiles) -> ssl.SSLContext:
    def no_password() -> str:
        raise ConfigurationError(
            f"--tls-key {files.key} is encrypted; a server cannot type its password: decrypt it, "
            "and keep the file readable for this user only"
        )

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(files.cert, files.key, password=no_password)
    except ssl.SSLError as error:
        reason = error.reason or str(error)
        if reason == "KEY_VALUES_MISMATCH":
            text = f"the key {files.key} does not belong to the certificate {files.cert}"
        else:
            text = (
                f"{files.cert} and {files.key} are no certificate and key in PEM form "
                f"({reason.lower().replace('_', ' ')})"
            )
        raise ConfigurationError(f"HTTPS: {text}") from None
    return context


def _shake_hands(files: TlsFiles) -> None:
    """Be server and client once, in memory: what a client would refuse is found now."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = _server_context(files).wrap_bio(to_server, to_client, server_side=True)
    try:
        client = files.client_context().wrap_bio(to_client, to_server)
        for _ in range(10):
            is_done = [_is_done(client), _is_done(server)]  # both take their turn
            if all(is_done):
                return
    except ssl.SSLCertVerificationError as error:
        raise ConfigurationError(
            f"--tls-cert {files.cert}: clients will refuse it ({error.verify_message})"
        ) from None
    except ssl.SSLError as error:
        raise ConfigurationError(f"--tls-cert {files.cert}: {error.reason or error}") from None
    raise ConfigurationError(f"--tls-cert {files.cert}: the TLS handshake does not end")


def _is_done(end: ssl.SSLObject) -> bool:
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
