"""The books of all keys: requests and tokens of the last minute, and what runs, by gateway.

One ledger is the authority for all gateways, in an actor of its own (ledger_actor.py), so that
limits hold exactly. Dividing each limit by the number of gateways was the other way: it refuses
clients that stay on one connection, and cannot tell who has the one place of a limit of one.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from .rate_window import RateWindow

SILENT_S = 15.0  # a gateway that did not renew for so long is dead, and what it ran is over


class Measure(StrEnum):
    """What a key's limits are about; OpenAI's words."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENCY = "concurrent_requests"


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyLimits:
    """Of one key; None is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None

    def divided(self, by: int) -> KeyLimits:
        """One of `by` equal shares, at least 1 each."""

        def share(limit: int | None) -> int | None:
            return None if limit is None else max(1, limit // by)

        return KeyLimits(
            requests_per_minute=share(self.requests_per_minute),
            tokens_per_minute=share(self.tokens_per_minute),
            max_concurrent=share(self.max_concurrent),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """How far a key is from its limits."""

    requests: int  # of the last minute
    tokens: int
    running: int  # requests
    reset_requests_s: float  # until the minute's count is zero if nothing else comes
    reset_tokens_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Excess:
    """Why a request was not let in."""

    measure: Measure
    limit: int
    used: int
    asked: int
    wait_s: float
    standing: Standing


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """Tokens set aside for a request that runs."""

    ledger: str  # whose books they stand in
    slot: int
    tokens: int
    standing: Standing


@dataclass(slots=True)
class _Account:
    requests: RateWindow = field(default_factory=RateWindow)
    tokens: RateWindow = field(default_factory=RateWindow)
    running: dict[str, int] = field(default_factory=dict)  # by gateway


class Ledger:
    """Admits, reserves and settles. Plain and quick: all methods belong to one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.id = secrets.token_hex(8)
        self._clock = clock
        self._accounts: dict[str, _Account] = {}  # by the key's name
        self._seen_s: dict[str, float] = {}  # gateway -> when it last renewed

    def enter(self, gateway: str, key: str, limits: KeyLimits) -> Standing | Excess:
        """One more request of this key; it runs until `leave`. What is refused does not count."""
        now_s = self._clock()
        self._seen_s[gateway] = now_s
        self._drop_silent(now_s)
        account = self._accounts.setdefault(key, _Account())
        running = sum(account.running.values())
        if limits.max_concurrent is not None and running >= limits.max_concurrent:
            limit, wait_s = limits.max_concurrent, 1.0
            return self._excess(key, Measure.CONCURRENCY, limit, running, 1, wait_s)
        limit = limits.requests_per_minute
        spent = account.requests.spent(now_s)
        if limit is not None and spent >= limit:
            wait_s = account.requests.wait_s(now_s, 1, limit)
            return self._excess(key, Measure.REQUESTS, limit, spent, 1, wait_s)
        account.requests.add(now_s, 1)
        account.running[gateway] = account.running.get(gateway, 0) + 1
        return self.standing(key)

    def reserve(self, key: str, limits: KeyLimits, tokens: int) -> Reservation | Excess:
        """Set `tokens` aside under the key's token rate."""
        now_s = self._clock()
        account = self._accounts.setdefault(key, _Account())
        limit, spent = limits.tokens_per_minute, account.tokens.spent(now_s)
        if limit is not None and spent + tokens > limit:
            wait_s = account.tokens.wait_s(now_s, tokens, limit)
            return self._excess(key, Measure.TOKENS, limit, spent, tokens, wait_s)
        slot, standing = account.tokens.add(now_s, tokens), self.standing(key)
        return Reservation(ledger=self.id, slot=slot, tokens=tokens, standing=standing)

    def settle(self, key: str, reservation: Reservation, used: int) -> None:
        """The request is over: what it did not use is free again, what went beyond is spent. Of a
        reservation in lost books, all that was used is spent now.
        """
        account = self._accounts.setdefault(key, _Account())
        reserved = reservation.tokens if reservation.ledger == self.id else 0
        if used <= reserved:
            account.tokens.give_back(reservation.slot, reserved - used)
        else:
            account.tokens.add(self._clock(), used - reserved)

    def leave(self, gateway: str, key: str) -> None:
        """A request that entered is over."""
        running = self._accounts.setdefault(key, _Account()).running
        if running.get(gateway, 0) > 1:
            running[gateway] -= 1
        else:
            running.pop(gateway, None)

    def renew(self, gateway: str, running: dict[str, int]) -> None:
        """A gateway lives. One that this ledger does not know tells what it runs: a new ledger, or
        a gateway that was taken for dead.
        """
        now_s = self._clock()
        if gateway not in self._seen_s:
            for key, count in running.items():
                self._accounts.setdefault(key, _Account()).running[gateway] = count
        self._seen_s[gateway] = now_s
        self._drop_silent(now_s)

    def num_gateways(self) -> int:
        """Gateways that live, as far as known."""
        return len(self._seen_s)

    def standing(self, key: str) -> Standing:
        """Where a key is now."""
        now_s = self._clock()
        account = self._accounts.setdefault(key, _Account())
        return Standing(
            requests=account.requests.spent(now_s),
            tokens=account.tokens.spent(now_s),
            running=sum(account.running.values()),
            reset_requests_s=account.requests.reset_s(now_s),
            reset_tokens_s=account.tokens.reset_s(now_s),
        )

    def _excess(
        self, key: str, measure: Measure, limit: int, used: int, asked: int, wait_s: float
    ) -> Excess:
        return Excess(
            measure=measure,
            limit=limit,
            used=used,
            asked=asked,
            wait_s=wait_s,
            standing=self.standing(key),
        )

    def _drop_silent(self, now_s: float) -> None:
        for gateway in [g for g, seen_s in self._seen_s.items() if now_s - seen_s > SILENT_S]:
            del self._seen_s[gateway]
            for account in self._accounts.values():
                account.running.pop(gateway, None)
