"""What a scaling policy would do with recorded arrivals: queue times, cost and starts, in virtual
time and by rules that are stated here.

A worker runs up to `concurrency` answers; an answer that begins as the n-th beside others takes
n times its prompt's prefill and a decode step of n rows for each token, so that a full worker has
its measured speed. Answers wait in one line, first come first served, and go to the free worker
that would be done first; one that only some pools can serve keeps no place from others. A worker is
paid for from the wish for it until its last answer ends.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from ..runtime.speeds import Speeds
from .autoscaling_pools import PoolRules

TICK_S = 1.0  # between two looks of the policy


@dataclass(frozen=True, slots=True)
class Arrival:
    """One answer that is asked for."""

    time_s: float
    num_prompt: int
    num_new: int
    able: frozenset[str] | None = None  # the pools that can serve it; None: all


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedPool:
    """A kind of worker: its rules, and how fast it is."""

    rules: PoolRules
    speeds: Speeds
    concurrency: int
    num_places: float = math.inf  # workers beyond these are wanted in vain: no node has room

    def seconds(self, arrival: Arrival, rows: int) -> float:
        """From start to last token, as one of `rows`."""
        prefill_s = arrival.num_prompt / self.speeds.prefill_tokens_s
        return rows * prefill_s + arrival.num_new * self.speeds.decode_step_s(rows)


@dataclass(kw_only=True, slots=True, eq=False)
class SimulatedWorker:
    """One worker from the wish for it to its end."""

    pool: str
    started_s: float
    ready_s: float
    busy: int = 0
    is_leaving: bool = False
    ended_s: float | None = None


@dataclass(kw_only=True, slots=True)
class Look:
    """What a policy may see at a tick."""

    now_s: float
    pools: Mapping[str, SimulatedPool]
    ready: dict[str, int]
    target: dict[str, int]
    running: dict[str, int]  # answers by pool
    num_bound: dict[str, int]  # of those, what not every pool can serve
    waiting: Sequence[Arrival]
    arrived: Sequence[Arrival]  # since the last look
    finished: Sequence[Arrival]  # since the last look


class Scaler(Protocol):
    """A policy with its memory."""

    def targets(self, look: Look) -> dict[str, int]:
        """Workers wanted by pool; the simulator keeps them within the pools' bounds."""
        ...


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What came of it."""

    waits_s: list[float] = field(default_factory=list)  # of each answer, in order of its start
    cost: float = 0.0  # in the currency of the prices
    starts: dict[str, int] = field(default_factory=dict)
    history: list[tuple[float, dict[str, int]]] = field(default_factory=list)  # targets by time
    queue: list[tuple[float, int]] = field(default_factory=list)  # answers that wait, by time

    @property
    def num_starts(self) -> int:
        return sum(self.starts.values())

    def wait_s(self, percent: float) -> float:
        """The queue time that so many percent of the answers do not exceed."""
        ordered = sorted(self.waits_s)
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


def simulate(
    arrivals: Sequence[Arrival],
    pools: Mapping[str, SimulatedPool],
    scaler: Scaler,
    *,
    tick_s: float = TICK_S,
) -> Outcome:
    """All arrivals, by order of time, until the last answer ends and every pool had its last tick
    at the trace's end.
    """
    run = _Run(arrivals, pools, scaler)
    run.begin()
    while run.advance(tick_s):
        pass
    return run.outcome


class _Run:
    def __init__(
        self, arrivals: Sequence[Arrival], pools: Mapping[str, SimulatedPool], scaler: Scaler
    ) -> None:
        self._arrivals = deque(arrivals)
        self._end_s = arrivals[-1].time_s if arrivals else 0.0
        self._pools = pools
        self._scaler = scaler
        self._line: deque[Arrival] = deque()
        self._workers: list[SimulatedWorker] = []
        self._ends: list[tuple[float, int, SimulatedWorker, Arrival]] = []
        self._numbers = count()
        self._now_s = 0.0
        self._arrived: list[Arrival] = []
        self._finished: list[Arrival] = []
        self.outcome = Outcome(starts=dict.fromkeys(pools, 0))

    def begin(self) -> None:
        """The floors are there, warm, when the trace begins."""
        for name, pool in self._pools.items():
            for _ in range(pool.rules.min_workers):
                self._workers.append(SimulatedWorker(pool=name, started_s=0.0, ready_s=0.0))

    def advance(self, tick_s: float) -> bool:
        """One tick of the policy and what happens until the next; False: all is over."""
        self._apply(self._scaler.targets(self._look()))
        self._until(self._now_s + tick_s)
        if self._arrivals or self._line or self._ends:
            return True
        self._close()
        return False

    def _until(self, end_s: float) -> None:
        """Ends, workers that become ready, and arrivals, in the order of time."""
        self._start_all(self._now_s)  # on workers that became ready this moment
        for ready_s in sorted({w.ready_s for w in self._workers if self._now_s < w.ready_s}):
            if ready_s < end_s:
                self._events(ready_s)
                self._start_all(ready_s)
        self._events(end_s)
        self._now_s = end_s

    def _events(self, end_s: float) -> None:
        while True:
            arrival_s = self._arrivals[0].time_s if self._arrivals else end_s
            done_s = self._ends[0][0] if self._ends else end_s
            if min(arrival_s, done_s) >= end_s:
                return
            if done_s <= arrival_s:
                _, _, worker, done = heapq.heappop(self._ends)
                self._finish(worker, done, done_s)
                self._start_all(done_s)
            else:
                arrival = self._arrivals.popleft()
                self._arrived.append(arrival)
                self._line.append(arrival)
                self._start_all(arrival_s)

    def _finish(self, worker: SimulatedWorker, done: Arrival, now_s: float) -> None:
        worker.busy -= 1
        self._finished.append(done)
        if worker.is_leaving and not worker.busy:
            self._end(worker, now_s)

    def _start_all(self, now_s: float) -> None:
        full: set[frozenset[str] | None] = set()
        place = 0
        while place < len(self._line) and None not in full:
            arrival = self._line[place]
            worker = None if arrival.able in full else self._fastest_free(arrival, now_s)
            if worker is None:
                full.add(arrival.able)
                place += 1
            else:
                del self._line[place]
                self._start(arrival, worker, now_s)

    def _start(self, arrival: Arrival, worker: SimulatedWorker, now_s: float) -> None:
        worker.busy += 1
        self.outcome.waits_s.append(now_s - arrival.time_s)
        end_s = now_s + self._pools[worker.pool].seconds(arrival, worker.busy)
        heapq.heappush(self._ends, (end_s, next(self._numbers), worker, arrival))

    def _fastest_free(self, arrival: Arrival, now_s: float) -> SimulatedWorker | None:
        free = [
            w
            for w in self._workers
            if w.ready_s <= now_s
            and not w.is_leaving
            and w.busy < self._pools[w.pool].concurrency
            and (arrival.able is None or w.pool in arrival.able)
        ]
        return min(
            free, key=lambda w: self._pools[w.pool].seconds(arrival, w.busy + 1), default=None
        )

    def _look(self) -> Look:
        here = [w for w in self._workers if not w.is_leaving]
        running, num_bound = dict.fromkeys(self._pools, 0), dict.fromkeys(self._pools, 0)
        for worker in self._workers:
            running[worker.pool] += worker.busy
        for _, _, worker, arrival in self._ends:
            num_bound[worker.pool] += arrival.able is not None
        look = Look(
            now_s=self._now_s,
            pools=self._pools,
            ready={n: sum(w.pool == n and w.ready_s <= self._now_s for w in here) for n in running},
            target={n: sum(w.pool == n for w in here) for n in running},
            running=running,
            num_bound=num_bound,
            waiting=tuple(self._line),
            arrived=self._arrived,
            finished=self._finished,
        )
        self._arrived, self._finished = [], []
        return look

    def _apply(self, targets: Mapping[str, int]) -> None:
        for name, pool in self._pools.items():
            rules = pool.rules
            wanted = min(max(targets[name], rules.min_workers), rules.max_workers)
            here = [w for w in self._workers if w.pool == name and not w.is_leaving]
            for number in range(len(here), wanted):
                ready_s = self._now_s + rules.cold_start_s
                if number >= pool.num_places:
                    ready_s = math.inf
                else:
                    self.outcome.starts[name] += 1
                self._workers.append(
                    SimulatedWorker(pool=name, started_s=self._now_s, ready_s=ready_s)
                )
            surplus = max(0, len(here) - wanted)
            for worker in sorted(here, key=lambda w: (-w.ready_s, w.busy))[:surplus]:
                worker.is_leaving = True
                if not worker.busy:
                    self._end(worker, self._now_s)
        counts = {n: sum(w.pool == n and not w.is_leaving for w in self._workers) for n in targets}
        self.outcome.history.append((self._now_s, counts))
        self.outcome.queue.append((self._now_s, len(self._line)))

    def _end(self, worker: SimulatedWorker, now_s: float) -> None:
        worker.ended_s = now_s
        self._workers.remove(worker)
        seconds = now_s - worker.started_s if worker.ready_s < math.inf else 0.0
        self.outcome.cost += self._pools[worker.pool].rules.price * seconds / 3600

    def _close(self) -> None:
        for worker in tuple(self._workers):
            self._end(worker, max(self._now_s, worker.started_s))
