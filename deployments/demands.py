"""What arrives at a model's queue and waits in it, by the pools that can serve it: what the scaling
policy is told.
"""

from __future__ import annotations

from collections.abc import Iterable

from .arrivals import Arrivals
from .autoscaling_pools import Demand, Tokens
from .pool_memory import PoolBook
from .router import Ask

MAX_SETS = 32  # of pools, whose demand is told apart

Able = frozenset[str] | None
"""The pools that can serve an answer; None: any."""


class Demands:
    """Of one model."""

    def __init__(self, pools: PoolBook) -> None:
        self._pools = pools
        self._arrivals: dict[Able, Arrivals] = {}  # of new answers

    def arrive(self, ask: Ask, now_s: float) -> None:
        """A new answer is wanted."""
        arrivals = self._arrivals.setdefault(self._able(ask), Arrivals())
        arrivals.add(ask.num_prompt, ask.num_answer, now_s)

    def by_pools(self, waiting: Iterable[Ask], now_s: float) -> dict[Able, Demand]:
        """What came lately and what waits now."""
        asks: dict[Able, list[Ask]] = {able: [] for able in self._arrivals}
        for ask in waiting:
            asks.setdefault(self._able(ask), []).append(ask)
        return {
            able: Demand(
                arriving=self._arrivals[able].rate(now_s) if able in self._arrivals else Tokens(),
                waiting=Tokens(
                    prompt=sum(ask.num_prompt for ask in its),
                    new=sum(ask.num_answer for ask in its),
                ),
                num_unfinished=len(its),
            )
            for able, its in asks.items()
        }

    def _able(self, ask: Ask) -> Able:
        """Whose demand it is. Clients can name more sets of pools than we care to report: of the
        rest the first pool is asked alone.
        """
        able = self._pools.able(ask.needs, ask.rules)
        if able is None or able in self._arrivals or len(self._arrivals) < MAX_SETS:
            return able
        return frozenset({self._pools.first(able)})
