"""Answers on their way into a queue: their request is being read, or was let in a moment ago.

They have their place already. Else a burst would find the queue empty, all of it would be read by a
few threads, and who is too much would be told so only when those come to them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum, auto
from types import TracebackType
from typing import Self


class Stage(Enum):
    """Where an answer without a ticket is."""

    READING = auto()  # what it needs is not known yet
    QUEUE = auto()  # on its way to the workers that there are
    HELD = auto()  # on its way to a pool that is to wake


@dataclass(frozen=True, slots=True)
class Room:
    """Of one queue: answers in it or on their way to it, how many may wait, and how many more may
    come.
    """

    num_waiting: int
    limit: int
    left: int


class Seat:
    """The places of one request's answers. As a context it gives them back after an exception."""

    def __init__(self, taken: Counter[Stage], num_answers: int) -> None:
        self._taken = taken
        self._stage = Stage.READING
        self._num_left = num_answers
        taken[self._stage] += num_answers

    def move(self, stage: Stage) -> None:
        """It is known which queue they are for."""
        self._taken[self._stage] -= self._num_left
        self._stage = stage
        self._taken[stage] += self._num_left

    def rise(self) -> None:
        """One of them is in the queue itself now."""
        if self._num_left:
            self._num_left -= 1
            self._taken[self._stage] -= 1

    def leave(self) -> None:
        """Give back what is left; a second time is nothing."""
        self._taken[self._stage] -= self._num_left
        self._num_left = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.leave()
