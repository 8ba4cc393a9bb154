"""What a user can cause, as one tree; everything else is a bug and stays an assert.

PolypathError
├── ConfigurationError (ValueError)   an option, file or variable is wrong; raised before weights
load
│   ├── ModelError                    the model's files are missing, broken or of a kind we do not
serve
│   └── PlanError                     no execution path fits; carries the refusals and the nearest
choice that works
├── RequestError (ValueError)         one request is wrong; `param` names its field
│   └── ContextLengthError            prompt (and answer) do not fit the context
├── QueueFullError                    the worker's finite queue is full; `retry_after_s` says when
to come back
└── EngineError                       a step failed or the engine has stopped
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .planning.refusal import Refusal


class PolypathError(Exception):
    """Base of all errors that Polypath raises on purpose; its text is fit for a user's eyes."""


class ConfigurationError(PolypathError, ValueError):
    """An option, file or environment variable is wrong."""


class ModelError(ConfigurationError):
    """A model's files are missing, broken, or of a kind Polypath does not serve."""


class PlanError(ConfigurationError):
    """No execution path fits what was asked.

    `refusals` are the rules that said no; `nearest` is one sentence naming the closest choice that
    works, or None.
    """

    def __init__(
        self, message: str, refusals: Sequence[Refusal] = (), nearest: str | None = None
    ) -> None:
        super().__init__(message)
        self.refusals = tuple(refusals)
        self.nearest = nearest


class RequestError(PolypathError, ValueError):
    """One request is wrong. `param` names the offending field, `code` is OpenAI's error code where
    there is one.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.message, self.param, self.code)


class ContextLengthError(RequestError):
    """The prompt, or prompt and answer together, do not fit the model's context."""


class QueueFullError(PolypathError):
    """The finite queue is full. `retry_after_s`: seconds after which a place is likely free."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.message, self.retry_after_s)


class EngineError(PolypathError):
    """A step failed, or the engine has stopped and takes no more requests."""
