"""How a gateway asks the ledger, wherever it lives."""

from __future__ import annotations

from typing import Protocol

from .ledger import Excess, KeyLimits, Ledger, Reservation, Standing


class LedgerLink(Protocol):
    """The ledger's methods. What ends a request waits for no answer."""

    async def enter(self, key: str, limits: KeyLimits) -> Standing | Excess:
        """Count a request in."""
        ...

    async def reserve(self, key: str, limits: KeyLimits, tokens: int) -> Reservation | Excess:
        """Set tokens aside."""
        ...

    async def standing(self, key: str) -> Standing:
        """Where a key is now."""
        ...

    def settle(self, key: str, reservation: Reservation, used: int) -> None:
        """Turn a reservation into what was used."""
        ...

    def leave(self, key: str) -> None:
        """Count a request out."""
        ...


class LocalLedger:
    """A ledger in this process: for the only gateway, and the plain twin of the shared one."""

    def __init__(self, gateway: str, ledger: Ledger | None = None) -> None:
        self._gateway = gateway
        self._ledger = ledger or Ledger()

    async def enter(self, key: str, limits: KeyLimits) -> Standing | Excess:
        return self._ledger.enter(self._gateway, key, limits)

    async def reserve(self, key: str, limits: KeyLimits, tokens: int) -> Reservation | Excess:
        return self._ledger.reserve(key, limits, tokens)

    async def standing(self, key: str) -> Standing:
        return self._ledger.standing(key)

    def settle(self, key: str, reservation: Reservation, used: int) -> None:
        self._ledger.settle(key, reservation, used)

    def leave(self, key: str) -> None:
        self._ledger.leave(self._gateway, key)
