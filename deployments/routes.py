"""The HTTP API as one FastAPI app over a `Gateway`; knows nothing of Ray."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from ..runtime.errors import PolypathError
from .api_settings import ApiSettings
from .auth import Guard
from .auth_config import AuthConfig
from .deadline import Deadline
from .edge import Edge
from .errors import ApiError, as_api_error
from .gateway import Gateway
from .ledger_link import LedgerLink, LocalLedger
from .rate_headers import RATE_HEADERS
from .routes_admin import admin_routes
from .routes_generate import generation_routes
from .routes_info import info_routes
from .routes_tokenize import tokenize_routes

EXPOSED_HEADERS = (
    "x-request-id",
    "x-polypath-worker",
    "x-polypath-path",
    "x-polypath-route",
    "retry-after",
    *RATE_HEADERS,
)


def build_api(
    gateway: Gateway, auth: AuthConfig | None = None, ledger: LedgerLink | None = None
) -> FastAPI:
    """The whole API. The gateway may gain and lose models and workers while it runs. Without `auth`
    it is open; without `ledger` this gateway counts alone.
    """
    auth = auth or AuthConfig()
    ledger = ledger or LocalLedger(gateway.id)
    app = FastAPI(
        title="Polypath",
        docs_url=None,  # its pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        middleware=[
            *_cors(gateway.settings),
            Middleware(Edge, metrics=gateway.metrics),
            Middleware(Guard, auth=auth, ledger=ledger, metrics=gateway.metrics),
            Middleware(Deadline),
        ],
    )
    for kind in (ApiError, PolypathError):
        app.add_exception_handler(kind, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    for router in (
        generation_routes(gateway),
        tokenize_routes(gateway),
        info_routes(gateway),
        admin_routes(gateway, auth, ledger),
    ):
        app.include_router(router)
    app.state.gateway = gateway
    return app


def _cors(settings: ApiSettings) -> list[Middleware]:
    if not settings.cors_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "HEAD"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    ]


async def _answer_error(_: Request, error: Exception) -> Response:
    return as_api_error(error).response()


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: no such route, or another method than the route has."""
    assert isinstance(error, HTTPException), "registered for this class only"
    path = request.url.path[:200]
    if error.status_code == 404:
        return ApiError(404, f"There is no {path} here; GET / lists what there is.").response()
    headers = dict(error.headers or {})
    if error.status_code == 405:
        if headers.get("Allow") == "GET":
            headers["Allow"] = "GET, HEAD"
        message = f"{path} does not take {request.method}; it takes {headers.get('Allow')}."
        return ApiError(405, message, headers=headers).response()
    return ApiError(error.status_code, str(error.detail), headers=headers).response()
