"""Errors on the road: what the worker raised, named, and the same error again at the gateway."""

from __future__ import annotations

from ..runtime.errors import (
    ContextLengthError,
    EngineError,
    PolypathError,
    QueueFullError,
    RequestError,
)
from .frames import Fault


def fault_of(attempt: int, error: PolypathError) -> Fault:
    """An error as a message."""
    if isinstance(error, RequestError):
        kind = "context" if isinstance(error, ContextLengthError) else "request"
        return Fault(attempt, kind, error.message, error.param, error.code)
    if isinstance(error, QueueFullError):
        return Fault(attempt, "queue", error.message, retry_after_s=error.retry_after_s)
    return Fault(attempt, "engine", str(error))


def error_of(fault: Fault) -> PolypathError:
    """A message as the error it was made of."""
    if fault.kind == "context":
        return ContextLengthError(fault.message, fault.param, fault.code)
    if fault.kind == "request":
        return RequestError(fault.message, fault.param, fault.code)
    if fault.kind == "queue":
        return QueueFullError(fault.message, fault.retry_after_s)
    return EngineError(fault.message)
