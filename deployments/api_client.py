"""The few calls that the command line makes to a running server, with errors for a terminal."""

from __future__ import annotations

import json
import ssl
from collections.abc import Generator, Iterator
from typing import Any

import httpx

from ..runtime.errors import PolypathError
from .config import api_key

CONNECT_TIMEOUT_S = 5.0


class ApiClientError(PolypathError):
    """The server could not be reached, or refused; the text says which and why."""


class ApiClient:
    """Talks to one server. `url` may end in /v1 or not; the key is by default POLYPATH_API_KEY."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if "://" not in self.url:
            self.url = f"http://{self.url}"
        # An answer may take as long as it takes; only reaching the server must be quick.
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        # Proxies are for the world outside, and httpx would send even loopback through them.
        self._client = httpx.Client(
            base_url=self.url, timeout=timeout, trust_env=False, verify=_trust(self.url)
        )
        key = api_key() if key is None else key
        if key:
            self._client.headers["Authorization"] = f"Bearer {key}"

    def __enter__(self) -> ApiClient:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def get(self, path: str) -> Any:  # the JSON that the path answers
        """The body of a GET."""
        try:
            response = self._client.get(path)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None
        if response.is_error:
            raise ApiClientError(_message(response.status_code, response.content))
        return response.json()

    def models(self) -> list[str]:
        """Names of the models served."""
        return [model["id"] for model in self.get("/v1/models")["data"]]

    def stream_chat(
        self, model: str, messages: list[dict[str, str]], *, temperature: float
    ) -> Generator[str]:
        """Pieces of the answer as they come. Closing the iterator early ends the answer on the
        server.
        """
        body = {"model": model, "messages": messages, "temperature": temperature, "stream": True}
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    raise ApiClientError(_message(response.status_code, response.read()))
                yield from _pieces(response.iter_lines())
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: Exception) -> ApiClientError:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return ApiClientError(
                f"the certificate of {self.url} is not trusted ({error}); if it is yours, name "
                "its file in SSL_CERT_FILE"
            )
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ApiClientError(
                f"nothing answers at {self.url}; start it with `polypath serve`, or name "
                "another with --url"
            )
        return ApiClientError(
            f"the connection to {self.url} failed: {error or type(error).__name__}"
        )


def _trust(url: str) -> ssl.SSLContext | bool:
    """Whom to believe: this machine's certificates, and what SSL_CERT_FILE names."""
    return ssl.create_default_context() if url.startswith("https:") else True


def _pieces(lines: Iterator[str]) -> Iterator[str]:
    """Text out of the lines of a server-sent event stream."""
    for line in lines:
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise ApiClientError(str(event["error"].get("message", "the stream failed")))
        for choice in event.get("choices", ()):
            piece = choice["delta"].get("content")
            if piece:
                yield piece


def _message(status: int, body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered with status {status}"
