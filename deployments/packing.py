"""Whether several things of different size find room on nodes together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from .fleet import PoolSpec
from .nodes import Node

MAX_STEPS = 20_000  # past this a puzzle is taken as solvable: Ray will show
MAX_ITEMS = 300
MARGIN = 1e-6  # of sums of fractions


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One worker of a pool (None: the gateway), what it takes and where it may be."""

    pool: PoolSpec | None
    demand: dict[str, float]
    fits: Callable[[Node], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What is free on one node that is there or may come."""

    node: Node
    free: dict[str, float]

    def holds(self, demand: dict[str, float]) -> bool:
        """Whether this much is free. Resources that a node type does not list are not counted."""
        return all(
            self.free.get(name, self.node.has(name)) + MARGIN >= n for name, n in demand.items()
        )

    def without(self, demand: dict[str, float]) -> Room:
        """The room once something of that size is in it."""
        return replace(
            self, free={name: left - demand.get(name, 0.0) for name, left in self.free.items()}
        )


@dataclass(kw_only=True, slots=True)
class Packed:
    """The best that was found: `missing` is the first item without room, None when all have it."""

    missing: Item | None = None
    num_placed: int = 0  # of the pool of `missing`
    left: list[Room] = field(default_factory=list)


def pack(items: Sequence[Item], rooms: Sequence[Room]) -> Packed:
    """Try to place every item: those with the fewest places first, then the largest."""
    if len(items) > MAX_ITEMS:
        return Packed(left=list(rooms))
    choices = {id(item.pool): sum(item.fits(room.node) for room in rooms) for item in items}
    ordered = sorted(
        items,
        key=lambda item: (
            choices[id(item.pool)],
            -sum(item.demand.values()),
            id(item.pool),
        ),
    )
    search = _Search(ordered)
    search.place(0, list(rooms))
    if search.is_solved or search.num_steps > MAX_STEPS:
        return Packed(left=search.best)
    missing = ordered[search.depth]
    num_placed = sum(item.pool is missing.pool for item in ordered[: search.depth])
    return Packed(missing=missing, num_placed=num_placed, left=search.best)


class _Search:
    """Depth first; rooms that look alike are tried once."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = items
        self.depth = 0  # the first item that found no place on the best way
        self.best: list[Room] = []
        self.is_solved = False
        self.num_steps = 0

    def place(self, number: int, rooms: list[Room]) -> None:
        if not self.best or number > self.depth:
            self.depth, self.best = number, rooms
        if number == len(self._items):
            self.is_solved = True
            return
        item, tried = self._items[number], set[tuple[object, ...]]()
        for place, room in enumerate(rooms):
            kind = (room.node.name, room.node.id, *sorted(room.free.items()))
            if kind in tried or not item.fits(room.node) or not room.holds(item.demand):
                continue
            tried.add(kind)
            self.num_steps += 1
            self.place(number + 1, [*rooms[:place], room.without(item.demand), *rooms[place + 1 :]])
            if self.is_solved or self.num_steps > MAX_STEPS:
                return
