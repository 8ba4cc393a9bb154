"""What a gateway knows of pools that have no worker right now: how their last one was, or, of one
that never had any here, what its configuration settles.

So a request that only a sleeping pool can take is held and counted as that pool's demand, and one
that no pool will ever take is refused at once. Where nothing is known the pool is believed able:
its first worker tells, and is remembered.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .label_selector import parse_rule
from .needs import Needs
from .router import RoutingRules
from .served_worker import Worker

if TYPE_CHECKING:
    from .fleet import PoolSpec


@dataclass(kw_only=True, slots=True)
class PoolMemory:
    """One pool of a model. `possible` holds, for keys of requirements that the configuration
    settles, the values that a worker may have.
    """

    name: str
    max_model_len: int  # tokens that a worker holds at most, as given or as the model goes
    price: float = 1.0
    edition: str = ""  # of its options, as configured now
    possible: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    last: Worker | None = None  # the newest that there was

    @classmethod
    def of(cls, pool: PoolSpec, max_position: int) -> PoolMemory:
        """A pool as it is configured; `max_position` tokens are what the model goes to."""
        return cls(
            name=pool.name,
            max_model_len=min(pool.engine.max_model_len or max_position, max_position),
            price=pool.price,
            edition=pool.edition,
            possible=_possible(pool),
        )

    @property
    def context(self) -> int:
        """Tokens of the longest request that a worker of it may take."""
        return self.max_model_len if self.last is None else self.last.max_model_len

    def why_not(self, needs: Needs) -> list[str]:
        """Everything that its next worker is known to lack; empty when it may serve the request."""
        names = [each for each in needs.requirements if each.key == "worker"]
        if any(not each.is_not for each in names):
            return ["a worker that starts has a name of its own"]
        if self.last is not None:
            others = tuple(each for each in needs.requirements if each not in names)
            return needs.with_requirements(others).why_not(self.last)
        lacks: list[str] = []
        if self.max_model_len < needs.num_tokens:
            lacks.append(f"it holds {self.max_model_len} tokens of {needs.num_tokens}")
        for each in needs.requirements:
            reasons = [each.judge(value) for value in self.possible.get(each.key, ())]
            if reasons and None not in reasons:
                lacks.append(str(reasons[0]))
        return lacks


def _possible(pool: PoolSpec) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {"pool": (pool.name,)}
    for label, text in pool.label_selector.items():
        rule = parse_rule(text)
        if not rule.is_negated:
            found[f"label.{label}"] = rule.values
    # `device` is what nodes label themselves with, by the same words as a plan.
    device = found.get("label.device")
    if pool.engine.device != "auto":
        device = (pool.engine.device,)
    elif pool.num_gpus:
        device = ("cuda",)
    return found if device is None else {**found, "device": device}


class PoolBook:
    """All pools of one model beside the workers that it has."""

    def __init__(
        self,
        workers: Mapping[str, Worker],
        pools: Sequence[PoolMemory] = (),
        prefer: Sequence[str] = (),
    ) -> None:
        order = {name: number for number, name in enumerate(prefer)}
        rank = sorted(pools, key=lambda pool: (order.get(pool.name, len(order)), pool.price))
        self._pools = {pool.name: pool for pool in rank}  # the one to wake first comes first
        self._workers = workers
        self._members: tuple[Worker | None, ...] = ()
        self._era = 0

    def met(self, worker: Worker) -> bool:
        """Remember how a worker is, for the time when its pool has none. False: an update leaves
        it behind, and the next one will be another.
        """
        pool = self._pools.get(worker.pool)
        if pool is None:
            return True
        if worker.edition and pool.edition and worker.edition != pool.edition:
            return False
        pool.last = worker
        return True

    def sleeping(self) -> list[PoolMemory]:
        """The pools that have no worker, the one to wake first in front."""
        awake = {worker.pool for worker in self._workers.values()}
        return [pool for name, pool in self._pools.items() if name not in awake]

    def era(self) -> int:
        """A number that changes when a worker comes or goes."""
        members = (*self._workers.values(), *(pool.last for pool in self._pools.values()))
        if members != self._members:
            self._members, self._era = members, self._era + 1
        return self._era

    def may_come(self, needs: Needs) -> bool:
        """Whether a pool that has no worker may get one that can serve this."""
        return any(not pool.why_not(needs) for pool in self.sleeping())

    def able(self, needs: Needs, rules: RoutingRules | None = None) -> frozenset[str] | None:
        """The pools that this is demand of, when not all can serve it: those that have an able
        worker, or none and may get one. None: all can, or none. By rules without spill only the
        best pools for it are, of those awake if there are any.
        """
        asleep = {pool.name for pool in self.sleeping() if not pool.why_not(needs)}
        awake = {w.pool for w in self._workers.values() if not needs.why_not(w)}
        awake &= self._pools.keys()
        able = awake | asleep
        if rules is not None and rules.prefer and not rules.spill and able:
            able = awake or asleep
            best = min(rules.tier(name) for name in able)
            able = {name for name in able if rules.tier(name) == best}
        return frozenset(able) if 0 < len(able) < len(self._pools) else None

    def first(self, names: Collection[str]) -> str:
        """The one of these to wake first."""
        return next(name for name in self._pools if name in names)

    def say(self, needs: Needs) -> list[str]:
        """What each pool without a worker lacks, for the answer that refuses."""
        return [
            f"pool {pool.name}, without a worker now: {'; '.join(pool.why_not(needs))}"
            for pool in self.sleeping()
        ]
