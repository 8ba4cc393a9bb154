"""Whether several things of different size find room on nodes together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from .fleet import PoolSpec
from .nodes import Node

MAX_STEPS = 20_000  # past this a puzzle whose sums come out is taken as solvable: Ray will show
MAX_ITEMS = 300  # of more, one way is tried and no other
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
    choices = {id(item.pool): sum(item.fits(room.node) for room in rooms) for item in items}
    ordered = sorted(
        items,
        key=lambda item: (
            choices[id(item.pool)],
            -sum(item.demand.values()),
            id(item.pool),
        ),
    )
    short = _first_without_sum(ordered, rooms)
    if short is not None:
        return _missing(ordered, short, list(rooms))
    if len(ordered) > MAX_ITEMS:
        return Packed(left=_first_fit(ordered, rooms))
    search = _Search(ordered)
    search.place(0, list(rooms))
    if search.is_solved or search.num_steps > MAX_STEPS:
        return Packed(left=search.best)
    return _missing(ordered, search.depth, search.best)


def _missing(ordered: Sequence[Item], number: int, left: list[Room]) -> Packed:
    missing = ordered[number]
    num_placed = sum(item.pool is missing.pool for item in ordered[:number])
    return Packed(missing=missing, num_placed=num_placed, left=left)


def _first_without_sum(ordered: Sequence[Item], rooms: Sequence[Room]) -> int | None:
    """The first item that cannot have room whatever the order: its nodes hold too few of its size,
    or all nodes together have too little of something. None when the sums come out.
    """
    spare = {
        name: sum(room.free.get(name, room.node.has(name)) for room in rooms)
        for name in {name for item in ordered for name in item.demand}
    }
    places: dict[int, int] = {}  # of a pool's items that its nodes hold
    for number, item in enumerate(ordered):
        if id(item.pool) not in places:
            fitting = [room for room in rooms if item.fits(room.node)]
            places[id(item.pool)] = sum(_times(item, room, len(ordered)) for room in fitting)
        places[id(item.pool)] -= 1
        for name, amount in item.demand.items():
            spare[name] -= amount
        if places[id(item.pool)] < 0 or min(spare.values(), default=0.0) < -MARGIN:
            return number
    return None


def _times(item: Item, room: Room, most: int) -> int:
    """How often a room holds an item, at most `most` times."""
    times = [
        int((room.free.get(name, room.node.has(name)) + MARGIN) / amount)
        for name, amount in item.demand.items()
        if amount > 0
    ]
    return min([most, *times])


def _first_fit(ordered: Sequence[Item], rooms: Sequence[Room]) -> list[Room]:
    """What is left when each item takes the first room that holds it, or else is left out."""
    left = list(rooms)
    for item in ordered:
        for place, room in enumerate(left):
            if item.fits(room.node) and room.holds(item.demand):
                left[place] = room.without(item.demand)
                break
    return left


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
