"""The API's outermost layer: request ids, HEAD, trailing slashes, counts, and our own faults."""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect

from .errors import as_api_error

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from .metrics import GatewayMetrics

MAX_REQUEST_ID = 128  # characters
UNSAFE = re.compile(r"[^A-Za-z0-9._:\-]+")


class Edge:
    """Wraps the API. Never a second answer after the first byte, never a traceback to a client."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_head = scope["method"] == "HEAD"
        # A copy: the server below still has to know that it was HEAD.
        scope = {
            **scope,
            "path": scope["path"].rstrip("/") or "/",
            "method": "GET" if is_head else scope["method"],
        }
        started = False
        request_id = clean_request_id(Headers(scope=scope).get("x-request-id", ""))

        async def send_marked(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
                self._metrics.count_response(_route(scope), message["status"])
            elif is_head and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        try:
            await self._app(scope, receive, send_marked)
        except ClientDisconnect:
            return
        except Exception as error:  # the process's edge: as_api_error logs the traceback
            response = as_api_error(error).response()
            if started:
                return
            await response(scope, receive, send_marked)


def clean_request_id(sent: str) -> str:
    """A client's id without what could forge a log line, or a new one when nothing is left."""
    cleaned = UNSAFE.sub("", sent)[:MAX_REQUEST_ID]
    return cleaned or f"req-{secrets.token_hex(12)}"


def _route(scope: Scope) -> str:
    """The route's template; free paths would make a metric without bound."""
    return getattr(scope.get("route"), "path", "unmatched")
