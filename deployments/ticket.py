"""One answer that waits in a gateway's queue, and whose turn it is."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from .router import Ask, Decision, is_late
from .served_worker import Job

PATIENCE = 3.0  # goals: what waited for so long is late, and waits for no others any more


@dataclass(kw_only=True, slots=True, eq=False)
class Ticket:
    """One answer that waits; smaller `order` goes first."""

    ask: Ask
    order: tuple[int, float, int]  # priority, arrival, number
    future: asyncio.Future[Job]
    since_s: float  # of the loop's clock
    decision: Decision | None = None
    last_error: Exception | None = None  # of the worker that failed it
    stranded_since_s: float | None = None  # no worker can take it since then
    awaits_pool: bool = False  # only a pool that has no worker may take it
    judged_in: int = -1  # the era of workers and pools in which that was found
    service_s: float = 0.0  # that it takes at least, without waiting, as of the last look

    @property
    def is_settled(self) -> bool:
        """Whether it waits for nothing but room for a new answer."""
        is_decided = self.decision is not None and self.stranded_since_s is None
        return is_decided and not self.ask.is_resumed

    def is_held(self, era: int, now_s: float, limit_s: float) -> bool:
        """Whether it can only wait on: since the last look nobody came or went who matters to it,
        and it has waited less than `limit_s` for that.
        """
        since_s = self.stranded_since_s
        is_known = self.awaits_pool and self.judged_in == era and since_s is not None
        return is_known and now_s - (since_s or 0.0) < limit_s

    def turn(self, now_s: float) -> tuple[int, bool, float, int]:
        """Its place among those that wait: by priority, then those that can still keep their goal
        before those that cannot, for a while; then by arrival.
        """
        priority, arrived_s, number = self.order
        due_s = self.ask.due_s
        yields = (
            due_s is not None
            and is_late(due_s, now_s, (1.0 + self.ask.doubt) * self.service_s)
            and now_s - self.since_s < PATIENCE * (due_s - self.since_s)
        )
        return (priority, yields, arrived_s, number)
