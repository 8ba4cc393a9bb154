"""Who sent a request, and what they may: bounds its model, its priority and its tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .auth_config import KeyConfig, Role
from .errors import ApiError
from .ledger import Excess, KeyLimits, Reservation, Standing
from .rate_headers import rate_headers, too_many

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from .gateway import Gateway
    from .ledger_link import LedgerLink
    from .metrics import GatewayMetrics
    from .served_model import ServedModel


class Caller:
    """The sender of one request. Without a key nothing is counted and nothing is refused."""

    def __init__(
        self,
        key: KeyConfig | None = None,
        ledger: LedgerLink | None = None,
        metrics: GatewayMetrics | None = None,
    ) -> None:
        self.key = key
        self._metrics = metrics
        self.headers: dict[str, str] = {}  # for the answer: OpenAI's x-ratelimit-*
        self._ledger = ledger if key is not None and key.has_limits else None
        self._limits = KeyLimits()
        if key is not None:
            self._limits = KeyLimits(
                requests_per_minute=key.requests_per_minute,
                tokens_per_minute=key.tokens_per_minute,
                max_concurrent=key.max_concurrent,
            )
        self._has_entered = False
        self._reservation: Reservation | None = None
        self._num_prompt = 0
        self._num_generated: Callable[[], int] = int

    @property
    def is_admin(self) -> bool:
        """Whether the key is an admin key."""
        return self.key is not None and self.key.role is Role.ADMIN

    async def enter(self) -> None:
        """Count this request in. Raises `ApiError` 429."""
        if self._ledger is not None and self.key is not None:
            answer = await self._ledger.enter(self.key.name, self._limits)
            if isinstance(answer, Excess):
                raise self._refuse(answer)
            self._has_entered = True
            self._show(answer)
        self._count("admitted")

    def leave(self) -> None:
        """The request is over: settle what it used, and count it out."""
        if self.key is None:
            return
        num_generated = self._num_generated()
        if self._metrics is not None:
            self._metrics.count_key_tokens(self.key.name, self._num_prompt, num_generated)
        if self._ledger is None:
            return
        if self._reservation is not None:
            found, self._reservation = self._reservation, None
            self._ledger.settle(self.key.name, found, self._num_prompt + num_generated)
        if self._has_entered:
            self._has_entered = False
            self._ledger.leave(self.key.name)

    async def reserve(
        self, num_prompt: int, most: int, num_generated: Callable[[], int], *, is_named: bool
    ) -> None:
        """Set aside what the request may use at most: its prompts and `most` generated tokens.
        Raises `ApiError` 429.

        `num_generated` tells at the end how many it was. When the client named no max_tokens
        (`is_named` is false), at most the whole limit is set aside, so that such a request can run
        at all.
        """
        tokens, limit = num_prompt + most, self._limits.tokens_per_minute
        if self._ledger is None or self.key is None or limit is None:
            self._num_prompt, self._num_generated = num_prompt, num_generated
            return
        if not is_named:
            tokens = min(tokens, limit)
        answer = await self._ledger.reserve(self.key.name, self._limits, tokens)
        if isinstance(answer, Excess):
            raise self._refuse(answer)
        self._reservation = answer
        self._num_prompt, self._num_generated = num_prompt, num_generated
        self._show(answer.standing)

    def find_model(self, gateway: Gateway, name: str | None) -> ServedModel:
        """The model a request names, if this caller may use it. Raises as the gateway does, and
        `ApiError` 403.
        """
        if name is not None:
            self._require_model(name)
        model = gateway.find_model(name)
        self._require_model(model.name)
        return model

    def may_use(self, model: str) -> bool:
        """Whether the key covers this model."""
        return self.key is None or self.key.models is None or model in self.key.models

    def priority(self, asked: int | None) -> int:
        """The priority a request gets; smaller is more urgent. Raises `ApiError` 403 beyond the
        key's bound.
        """
        if self.key is None:
            return asked or 0
        if asked is None:
            return self.key.priority
        if asked < self.key.priority:
            raise ApiError(
                403,
                f"priority is {asked}; the key {self.key.name!r} may ask for "
                f"{self.key.priority} or more (smaller is more urgent)",
                param="priority",
                code="priority_not_allowed",
            )
        return asked

    def _require_model(self, name: str) -> None:
        if self.may_use(name):
            return
        assert self.key is not None and self.key.models is not None, "may_use says so"
        known = ", ".join(self.key.models) or "none"
        raise ApiError(
            403,
            f"The key {self.key.name!r} does not have access to model {name[:200]!r}. "
            f"Models it may use: {known}.",
            param="model",
            code="model_not_found",
        )

    def _refuse(self, excess: Excess) -> ApiError:
        assert self.key is not None, "only keys have limits"
        self._show(excess.standing)
        self._count(excess.measure)
        return too_many(self.key.name, excess)

    def _count(self, outcome: str) -> None:
        if self._metrics is not None and self.key is not None:
            self._metrics.count_key(self.key.name, outcome)

    def _show(self, standing: Standing) -> None:
        self.headers = rate_headers(self._limits, standing)


def caller_of(request: HttpRequest) -> Caller:
    """Who sent this request: the guard (auth.py) has found out."""
    caller = request.scope.get("state", {}).get("caller")
    assert isinstance(caller, Caller), "build_api puts the guard before all routes"
    return caller
