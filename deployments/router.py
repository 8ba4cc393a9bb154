"""Chooses the worker of a request: who can serve it at all, then who would be done with it first.

Rules, in order (docs/routing.md): workers that lack what the request needs are out; a resumed
answer stays with workers of its class while there are some; the first pool of `prefer` that has
room is taken; among what is left, the smallest expected time to the last token wins, with waiting
weighed threefold. When that worker has no room, the request waits for it at the gateway; one that
would miss its goal by waiting takes the best worker that is free instead.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from ..runtime.errors import ConfigurationError
from .forecast import Forecast
from .needs import Needs
from .served_worker import Worker

WAIT_WEIGHT = 3.0  # of 1 to 4 best or near it, mean and p95, at 2:1 to 8:1 and half to full load
CROWDING = 0.02  # what a full worker may cost more than an empty one that is as fast
Policy = Literal["fastest", "power_of_two"]
POLICIES: tuple[Policy, ...] = ("fastest", "power_of_two")


class RouteReason(StrEnum):
    """Why a request went where it did; the label of the counter."""

    ONLY = "only_capable"
    FASTEST = "fastest"
    PREFERRED = "preferred"
    SPILLED = "spilled"
    LATE = "late"
    RESUMED_SAME = "resumed_same_class"
    RESUMED_OTHER = "resumed_other_class"
    TWO_CHOICES = "power_of_two"


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingRules:
    """How a model's requests are spread. `prefer` lists pools, best first; all others come last.

    With `spill` the next pool is used while every capable worker of the better ones is full;
    without, requests wait for the best pool that has a capable worker at all.
    `policy="power_of_two"` is Ray Serve's rule, for comparison: two at random, the less busy one.
    """

    prefer: tuple[str, ...] = ()
    spill: bool = True
    policy: Policy = "fastest"

    def __post_init__(self) -> None:
        if len(set(self.prefer)) != len(self.prefer):
            raise ConfigurationError("prefer names a pool twice; each pool has one place")

    def tier(self, pool: str) -> int:
        """The place of a pool, 0 is best."""
        return self.prefer.index(pool) if pool in self.prefer else len(self.prefer)


@dataclass(kw_only=True, slots=True, eq=False)
class Ask:
    """What is to be placed: one answer, from its start or from where it was broken off."""

    needs: Needs
    num_prompt: int  # tokens to run before the next one comes: prompt, and answer so far
    num_answer: int  # tokens still expected
    rules: RoutingRules = field(default_factory=RoutingRules)
    avoids: set[Worker] = field(default_factory=set)  # they failed this answer
    came_from: Worker | None = None  # the worker that it is resumed from
    may_change_class: bool = True  # False: wait for a worker of the same class
    due_s: float | None = None  # of the loop's clock: when its last token is to be there
    doubt: float = 0.0  # by this share it may well take longer than expected

    @property
    def is_resumed(self) -> bool:
        """Whether another worker has begun it."""
        return self.came_from is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One worker in a decision."""

    worker: Worker
    refused: tuple[str, ...] = ()  # why it cannot serve this request
    full: str | None = None  # why it could not start it now
    seconds: float | None = None  # until the last token, waiting included

    def to_json(self) -> dict[str, Any]:  # JSON
        """For the header `x-polypath-route`."""
        said: dict[str, Any] = {"worker": self.worker.id}
        if self.worker.pool:
            said["pool"] = self.worker.pool
        if self.refused:
            return said | {"refused": list(self.refused)}
        if self.seconds is not None:
            said["seconds"] = round(self.seconds, 4)
        return said | ({"full": self.full} if self.full else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Where a request goes: now, or (`can_start` False) when `worker` has room; None: nowhere."""

    candidates: tuple[Candidate, ...]
    worker: Worker | None = None
    reason: RouteReason = RouteReason.FASTEST
    can_start: bool = False

    def service_s(self, forecasts: Forecasts) -> float:
        """Seconds that it takes where it is soonest done, once it has a place there."""
        able = (each for each in self.candidates if each.seconds is not None)
        return min(_seconds(each) - forecasts.of(each.worker).wait_s for each in able)

    def to_json(self, waited_s: float) -> dict[str, Any]:  # JSON
        """For the header `x-polypath-route`."""
        return {
            "worker": None if self.worker is None else self.worker.id,
            "reason": self.reason.value,
            "waited_s": round(waited_s, 4),
            "candidates": [candidate.to_json() for candidate in self.candidates],
        }


class Forecasts:
    """Forecasts of one pass over the waiting requests, each made when it is first asked for."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s
        self._by_worker: dict[Worker, Forecast] = {}

    def of(self, worker: Worker) -> Forecast:
        """The forecast, with all that was added to it in this pass."""
        found = self._by_worker.get(worker)
        if found is None:
            found = self._by_worker[worker] = Forecast(worker, self.now_s)
        return found

    def forget(self, worker: Worker) -> None:
        """Its requests changed: look at it anew when next asked."""
        self._by_worker.pop(worker, None)

    def have_room(self, workers: Iterable[Worker]) -> bool:
        """Whether any worker could start a short request within a few steps."""
        return any(self.of(worker).why_full(1, self.now_s) is None for worker in workers)


def choose(ask: Ask, workers: Iterable[Worker], forecasts: Forecasts) -> Decision:
    """Where `ask` goes. Changes nothing."""
    candidates = tuple(_candidate(ask, worker, forecasts) for worker in workers)
    fit = [candidate for candidate in candidates if not candidate.refused]
    if not fit:
        return Decision(candidates=candidates)
    if ask.rules.policy == "power_of_two":
        return _of_two(fit, candidates, forecasts)
    group = _same_class(ask, fit) if ask.is_resumed else _best_pool(ask, fit)
    best = min(group, key=lambda candidate: _cost(candidate, forecasts))
    reason = _reason(ask, best, fit)
    if best.full is not None and _is_late(ask, group, forecasts):
        # It waits for nothing: where it is to be late anyway it need not keep others waiting too.
        free = [candidate for candidate in group if candidate.full is None]
        if free:
            best = min(free, key=_seconds)
            reason = _reason(ask, best, fit) if ask.is_resumed else RouteReason.LATE
    return Decision(
        candidates=candidates, worker=best.worker, reason=reason, can_start=best.full is None
    )


def is_late(due_s: float | None, now_s: float, seconds: float) -> bool:
    """Whether what takes so many seconds from now on ends after it is due."""
    return due_s is not None and now_s + seconds > due_s


def _is_late(ask: Ask, group: Iterable[Candidate], forecasts: Forecasts) -> bool:
    """Whether it would be late at every one of these."""
    soonest_s = min(
        _seconds(each) + ask.doubt * (_seconds(each) - forecasts.of(each.worker).wait_s)
        for each in group
    )
    return is_late(ask.due_s, forecasts.now_s, soonest_s)


def _seconds(candidate: Candidate) -> float:
    assert candidate.seconds is not None, "it can serve the request, so it has a forecast"
    return candidate.seconds


def _cost(candidate: Candidate, forecasts: Forecasts) -> float:
    """Seconds until the last token, with what the choice costs others: whoever waits for a worker
    makes all wait that come after, so that waiting weighs more than running slowly elsewhere.
    """
    forecast = forecasts.of(candidate.worker)
    seconds = _seconds(candidate) + (WAIT_WEIGHT - 1.0) * forecast.wait_s
    return seconds * (1.0 + CROWDING * forecast.crowding)


def _candidate(ask: Ask, worker: Worker, forecasts: Forecasts) -> Candidate:
    refused = ask.needs.why_not(worker)
    if worker in ask.avoids:
        refused.append("it failed this answer")
    elif worker.is_draining:
        refused.append("it is draining")
    if refused:
        return Candidate(worker=worker, refused=tuple(refused))
    forecast = forecasts.of(worker)
    full = forecast.why_full(ask.num_prompt + 1, forecasts.now_s, is_resumed=ask.is_resumed)
    seconds = forecast.seconds(ask.num_prompt, ask.num_answer)
    return Candidate(worker=worker, full=full, seconds=seconds)


def _same_class(ask: Ask, fit: list[Candidate]) -> list[Candidate]:
    """Workers of the class that the answer began on while it may have them, those with room first;
    then any with room.
    """
    same = [candidate for candidate in fit if _is_same_class(ask, candidate.worker)]
    free = [candidate for candidate in same if candidate.full is None]
    if free or (same and not ask.may_change_class):
        return free or same
    return [candidate for candidate in fit if candidate.full is None] or fit


def _best_pool(ask: Ask, fit: list[Candidate]) -> list[Candidate]:
    """Workers of the best pool that may be used now; while all are full, of every pool."""
    tier = ask.rules.tier
    may_take = [c for c in fit if c.full is None] if ask.rules.spill else fit
    tiers = [tier(candidate.worker.pool) for candidate in may_take]
    best = min(tiers, default=None)
    return fit if best is None else [c for c in fit if tier(c.worker.pool) == best]


def _is_same_class(ask: Ask, worker: Worker) -> bool:
    return ask.came_from is not None and ask.came_from.resume_class == worker.resume_class


def _reason(ask: Ask, chosen: Candidate, fit: list[Candidate]) -> RouteReason:
    if ask.is_resumed:
        same = _is_same_class(ask, chosen.worker)
        return RouteReason.RESUMED_SAME if same else RouteReason.RESUMED_OTHER
    if len(fit) == 1:
        return RouteReason.ONLY
    tiers = [ask.rules.tier(candidate.worker.pool) for candidate in fit]
    if min(tiers) == max(tiers):
        return RouteReason.FASTEST
    is_best = ask.rules.tier(chosen.worker.pool) == min(tiers)
    return RouteReason.PREFERRED if is_best else RouteReason.SPILLED


def _of_two(
    fit: list[Candidate], candidates: tuple[Candidate, ...], forecasts: Forecasts
) -> Decision:
    two = random.sample(fit, min(2, len(fit)))
    chosen = min(two, key=lambda candidate: forecasts.of(candidate.worker).num_busy).worker
    return Decision(
        candidates=candidates, worker=chosen, reason=RouteReason.TWO_CHOICES, can_start=True
    )
