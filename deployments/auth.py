"""The guard before all routes: finds out who asks, and lets in only what their key allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders

from .auth_config import AuthConfig
from .caller import Caller
from .errors import ApiError
from .keys import KeyRing

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from .ledger_link import LedgerLink
    from .metrics import GatewayMetrics

OPEN_PATHS = frozenset({"/health"})  # load balancers hold no keys; the answer names no plan
ADMIN_PATHS = frozenset({"/metrics", "/v1/paths"})  # they tell of hardware, load and all models
ADMIN_PREFIX = "/admin"
NO_KEY = (
    "You didn't provide an API key. Send it in the header Authorization: Bearer YOUR_KEY; "
    "keys come from whoever runs this server."
)
WRONG_KEY = "Incorrect API key provided. Keys come from whoever runs this server."
NOT_ADMIN = "You have insufficient permissions for this operation: it needs an admin key."
NO_ADMIN = (
    "This changes the server, so it needs an admin key, and none is configured: "
    "make one with `polypath key`."
)


class Guard:
    """Stands within Edge, so that the path it judges is the very path that is routed.

    With no key configured everybody may read and ask; only what changes the server stays shut.
    """

    def __init__(
        self, app: ASGIApp, auth: AuthConfig, ledger: LedgerLink, metrics: GatewayMetrics
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._is_open = auth.is_open
        self._ring = KeyRing(auth.keys)
        self._ledger = ledger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        caller = self._identify(scope)

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(caller.headers)
            await send(message)

        try:
            if _is_counted(scope):
                await caller.enter()
            # In place: routing leaves the route in this scope, and Edge reads it.
            scope["state"] = {**scope.get("state", {}), "caller": caller}
            await self._app(scope, receive, send_with_limits)
        except ApiError as error:
            error.headers = {**caller.headers, **error.headers}
            raise
        finally:
            caller.leave()

    def _identify(self, scope: Scope) -> Caller:
        """Raises `ApiError` 401 or 403."""
        path = scope["path"]
        if self._is_open:
            if _is_under_admin(path) and scope["method"] != "GET":
                raise ApiError(403, NO_ADMIN, code="no_admin_key")
            return Caller()
        if path in OPEN_PATHS:
            return Caller()
        presented = bearer(Headers(scope=scope).getlist("authorization"))
        key = self._ring.find(presented) if presented else None
        if key is None:
            message, code = (WRONG_KEY, "invalid_api_key") if presented else (NO_KEY, None)
            raise ApiError(401, message, code=code, headers={"WWW-Authenticate": "Bearer"})
        caller = Caller(key, self._ledger, self._metrics)
        if _is_admin(path) and not caller.is_admin:
            raise ApiError(403, NOT_ADMIN, code="insufficient_permissions")
        return caller


def bearer(values: list[str]) -> str:
    """The token of the one Authorization header; "" when there is none, or another kind."""
    if len(values) != 1:
        return ""
    scheme, _, token = values[0].strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _is_admin(path: str) -> bool:
    return path in ADMIN_PATHS or _is_under_admin(path)


def _is_under_admin(path: str) -> bool:
    return path == ADMIN_PREFIX or path.startswith(f"{ADMIN_PREFIX}/")


def _is_counted(scope: Scope) -> bool:
    """Requests that make work count against limits; what only reads a list does not."""
    return scope["method"] == "POST" and not _is_admin(scope["path"])
