"""What goes wrong, as a status and OpenAI's body: `error.message`, `type`, `param`, `code`."""

from __future__ import annotations

import logging
import math
import traceback

import msgspec
from starlette.responses import Response

from ..runtime.errors import (
    ContextLengthError,
    EngineError,
    PolypathError,
    QueueFullError,
    RequestError,
)

logger = logging.getLogger("polypath.http")

QUOTABLE = (PolypathError, AssertionError, TypeError, AttributeError, ImportError, OSError)
TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An answer that is an error. `message` is for the client; `headers` go out with it; `kind` is
    OpenAI's `type`, by default what fits the status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        kind: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}
        self.kind = kind or TYPES.get(
            status, "invalid_request_error" if status < 500 else "server_error"
        )

    def body(self) -> dict[str, object]:
        """The error as OpenAI spells it."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        """The error as an HTTP response."""
        return Response(
            msgspec.json.encode(self.body()),
            self.status,
            headers=self.headers,
            media_type="application/json",
        )


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told about `error`. A bug is a 500 without internals; the log has them."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        code = error.code
        if code is None and isinstance(error, ContextLengthError):
            code = "context_length_exceeded"
        return ApiError(400, error.message, param=error.param, code=code)
    if isinstance(error, QueueFullError):
        return ApiError(
            429, error.message, code="queue_full", headers=retry_after(error.retry_after_s)
        )
    if isinstance(error, EngineError):
        return ApiError(503, str(error), code="engine_error", headers=retry_after(1.0))
    log_bug(error)
    return ApiError(500, "The server failed while answering; its log has the details.")


def retry_after(seconds: float) -> dict[str, str]:
    """The header `Retry-After` in whole seconds, at least 1."""
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def log_bug(error: BaseException) -> None:
    """Write the traceback, without messages that may quote what a client sent."""
    parts: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        quotable = isinstance(cause, QUOTABLE) and not isinstance(cause, RequestError)
        text = str(cause) if quotable else "(message left out: it may quote a request)"
        parts.append("".join(traceback.format_tb(cause.__traceback__)))
        parts.append(f"{type(cause).__module__}.{type(cause).__qualname__}: {text}\n")
        cause = cause.__cause__ or cause.__context__
    logger.error("a request failed by a fault of ours\n%s", "".join(parts))
