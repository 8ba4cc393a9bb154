"""A gateway's end of the shared ledger; counts by itself while that cannot be reached.

What holds: with the actor alive, limits are exact over all gateways. When it dies, each gateway
keeps to its equal share of every limit until a new actor is there (seconds), whose books begin
empty: within the minute around such a loss a key may get up to twice its rate. Places of running
requests are told to the new actor and are not lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayError

from .head_calls import HeadCalls
from .ledger import Excess, KeyLimits, Reservation, Standing
from .ledger_link import LocalLedger

logger = logging.getLogger("polypath.ledger")

RENEW_S = 5.0
RETRY_S = 1.0  # while there is no actor
CALL_S = 2.0  # an actor that is silent for so long counts as lost
START_S = 30.0  # a new one's process has to start
Connect = Callable[[], Any]  # Any: a handle of LedgerActor, which Ray does not type


class SharedLedger:
    """A `LedgerLink` to the actor. `start` it in the gateway's loop, and `close` it there."""

    def __init__(self, gateway: str, connect: Connect) -> None:
        self._gateway = gateway
        self._connect = connect
        self._actor: Any = None  # a handle of LedgerActor
        self._local = LocalLedger(gateway)
        self._running: Counter[str] = Counter()
        self._num_gateways = 1
        self._task: asyncio.Task[None] | None = None
        self._head = HeadCalls("ledger", START_S)

    async def start(self) -> None:
        """Connect, or count alone until that works."""
        await self._renew()
        self._task = asyncio.create_task(self._keep_renewing())

    def close(self) -> None:
        """Stop renewing: the ledger forgets this gateway."""
        if self._task is not None:
            self._task.cancel()
        self._head.close()

    async def enter(self, key: str, limits: KeyLimits) -> Standing | Excess:
        self._running[key] += 1  # before the call, so that a renewal never tells too little
        answer = await self._ask("enter", self._gateway, key, limits)
        if answer is None:
            answer = await self._local.enter(key, limits.divided(self._num_gateways))
        if isinstance(answer, Excess):
            self._running[key] -= 1
        return answer

    async def reserve(self, key: str, limits: KeyLimits, tokens: int) -> Reservation | Excess:
        answer = await self._ask("reserve", key, limits, tokens)
        if answer is None:
            share = limits.divided(self._num_gateways)
            return await self._local.reserve(key, share, tokens)
        return answer

    async def standing(self, key: str) -> Standing:
        return await self._ask("standing", key) or await self._local.standing(key)

    def settle(self, key: str, reservation: Reservation, used: int) -> None:
        if self._actor is None:
            self._local.settle(key, reservation, used)
        else:
            self._tell("settle", key, reservation, used)

    def leave(self, key: str) -> None:
        self._running[key] -= 1
        self._local.leave(key)  # entered there or not, it never counts below nothing
        self._tell("leave", self._gateway, key)

    def _tell(self, method: str, *args: object) -> None:
        if self._actor is not None:
            getattr(self._actor, method).remote(*args)

    async def _ask(self, method: str, *args: object) -> Any:  # what the method answers; None: lost
        actor = self._actor
        if actor is None:
            return None
        try:
            async with asyncio.timeout(CALL_S):
                return await getattr(actor, method).remote(*args)
        except (RayError, TimeoutError) as error:
            if self._actor is actor:
                self._actor = None
                logger.warning(
                    "the ledger of API keys is lost (%s): until a new one is there, this gateway "
                    "keeps to 1/%d of each limit",
                    type(error).__name__,
                    self._num_gateways,
                )
            return None

    async def _keep_renewing(self) -> None:
        while True:
            await asyncio.sleep(RETRY_S if self._actor is None else RENEW_S)
            await self._renew()

    async def _renew(self) -> None:
        """A sign of life; tells a ledger that does not know this gateway what runs here."""
        if self._actor is None:
            await self._find()
            return
        answer = await self._ask("renew", self._gateway, self._what_runs())
        self._num_gateways = answer or self._num_gateways

    async def _find(self) -> None:
        """Nobody is made to wait for a new actor: it is used from its first answer on."""
        try:
            actor = await self._head.ask(self._connect)
            async with asyncio.timeout(START_S):
                answer = await actor.renew.remote(self._gateway, self._what_runs())
        except (RayError, TimeoutError, ValueError) as error:  # ValueError: its name is being freed
            logger.debug("no ledger yet: %s", type(error).__name__)
            return
        self._actor, self._num_gateways = actor, answer
        self._local = LocalLedger(self._gateway)  # what it counted alone is over

    def _what_runs(self) -> dict[str, int]:
        return {key: count for key, count in self._running.items() if count > 0}
