"""What stands before Ray Serve's own HTTP proxy: limits and cleans a request's headers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.middleware import Middleware

from .edge import clean_request_id
from .errors import ApiError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

MAX_HEADER_BYTES = 32 * 1024  # all names and values of one request
REQUEST_ID = "x-request-id"
# Serve's proxy obeys these, whoever sends them: they switch off the notice that a client left, set
# a time limit, and choose a replica. Two words of one name come with - or _ between them.
COMMANDS = frozenset(
    {
        "x_request_disconnect_disabled",
        "x_request_timeout_seconds",
        "serve_multiplexed_model_id",
        "x_session_id",
    }
)


def middlewares() -> list[Middleware]:
    """Called by Serve's proxy at its start: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names it."""
    return [Middleware(CleanHeaders)]


class CleanHeaders:
    """Answers 431 to headers beyond the limit, replaces the request id by a clean one, and takes
    out commands to Serve.

    Serve's proxy echoes the id that it got, so it must never get a raw one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        request_id = clean_request_id(Headers(raw=headers).get(REQUEST_ID, ""))
        size = sum(len(name) + len(value) for name, value in headers)
        if size > MAX_HEADER_BYTES:
            await _too_large(size, request_id).response()(scope, receive, send)
            return
        kept = [(name, value) for name, value in headers if not _is_taken_out(name)]
        kept.append((REQUEST_ID.encode(), request_id.encode()))
        await self._app({**scope, "headers": kept}, receive, send)


def _is_taken_out(name: bytes) -> bool:
    text = name.decode("latin-1").lower()
    return text == REQUEST_ID or text.replace("-", "_") in COMMANDS


def _too_large(size: int, request_id: str) -> ApiError:
    return ApiError(
        431,
        f"the headers of this request have {size} bytes; at most {MAX_HEADER_BYTES} are read",
        code="headers_too_large",
        headers={"X-Request-Id": request_id, "Connection": "close"},
    )
