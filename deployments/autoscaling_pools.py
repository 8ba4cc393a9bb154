"""What the scaling rule is about: pools as they are and as they may be, and the demand for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..runtime.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolRules:
    """What a pool may have, and what it costs."""

    min_workers: int = 1
    max_workers: int = 1
    price: float = 1.0  # of one worker for an hour, in any currency
    cold_start_s: float = 60.0  # from the wish for a worker to its first token

    def __post_init__(self) -> None:
        if not 0 <= self.min_workers <= self.max_workers or self.max_workers < 1:
            raise ConfigurationError(
                f"min_workers {self.min_workers} and max_workers {self.max_workers}: give at least "
                "0 and 1, and not less than min_workers as max_workers"
            )
        if not (self.price > 0 and self.cold_start_s > 0):
            raise ConfigurationError(
                f"price {self.price:g} and cold_start_s {self.cold_start_s:g} must be above 0"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingRules:
    """How a model's pools follow its load."""

    target_queue_s: float = 5.0  # a new answer should not wait longer than this for a worker
    scale_down_delay_s: float = 120.0  # a worker that has not been wanted for so long goes
    max_utilization: float = 0.75  # of the fleet's measured speed that what arrives may take
    prefer: tuple[str, ...] = ()  # pools in the order in which they are filled

    def __post_init__(self) -> None:
        if not (self.target_queue_s > 0 and self.scale_down_delay_s >= 0):
            raise ConfigurationError(
                f"target_queue_s {self.target_queue_s:g} must be above 0, and scale_down_delay_s "
                f"{self.scale_down_delay_s:g} not below"
            )
        if not 0 < self.max_utilization <= 1:
            raise ConfigurationError(
                f"max_utilization is {self.max_utilization:g}; it must be above 0 and at most 1"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """Of prompts, and of answers still to come."""

    prompt: float = 0.0
    new: float = 0.0

    def seconds(self, pool: PoolState) -> float:
        """That one worker of the pool takes for them, with as many at once as suit it."""
        return self.prompt / pool.prefill_tokens_s + self.new / pool.decode_tokens_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """Of one model, at all gateways together; or the part of it that only some pools can serve."""

    arriving: Tokens = field(default_factory=Tokens)  # a second, lately
    waiting: Tokens = field(default_factory=Tokens)  # of answers that no worker has begun
    num_unfinished: int = 0  # answers that wait or run


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolState:
    """A pool as it is. Speeds are one worker's, of all its requests together; 0.0 unknown."""

    rules: PoolRules
    ready: int
    target: int  # what Serve works towards: ready ones and those on their way
    prefill_tokens_s: float = 0.0
    decode_tokens_s: float = 0.0
    lacking_s: float = 0.0  # for so long it has had fewer workers than its target, and got none

    @property
    def ceiling(self) -> int:
        """Workers that may be counted on: of a pool whose workers should be there by now and are
        not, the ready ones. Ray finds no place for the others, or they do not start.
        """
        most = self.rules.max_workers
        return most if self.lacking_s < self.rules.cold_start_s else min(self.ready, most)


Bound = Mapping[frozenset[str], Demand]
"""Demand that only some pools can serve, by the names of those that can."""

Lack = tuple[float, int]
"""Since when a pool has had fewer workers than wanted, and how many it had."""


def lack(before: Lack | None, ready: int, target: int, now_s: float) -> Lack | None:
    """What lacks now; each worker that comes begins it anew. None: nothing."""
    if ready >= target:
        return None
    since_s, had = before or (now_s, ready)
    return (now_s, ready) if ready > had else (since_s, min(ready, had))
