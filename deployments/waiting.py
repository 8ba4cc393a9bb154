"""The gateway's finite queue of one model: answers wait here until a worker has room for them."""

from __future__ import annotations

import asyncio
import bisect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count

from ..runtime.errors import QueueFullError, RequestError
from .autoscaling_pools import Demand
from .demands import Able, Demands
from .errors import ApiError, retry_after
from .forecast import AHEAD
from .needs import Needs, no_capable_worker
from .pool_memory import PoolBook
from .router import Ask, Decision, Forecasts, choose
from .seats import Room, Seat, Stage
from .served_worker import Job, Worker
from .ticket import Ticket

LOOK_AHEAD = 64  # waiting answers that one pass counts for workers that they wait for
ASLEEP_QUEUE = 256  # before the first worker was seen
TICK_S = 0.05  # while answers wait: other gateways' load changes without a word to us

OnPlaced = Callable[[Decision, float], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Of the queue of one model."""

    max_queued: int | None = None  # answers; None: as many as all workers' own queues would hold
    stranded_s: float = 30.0  # an answer that no worker can take waits so long for one to come
    same_class_s: float = 2.0  # a resumed answer waits so long for room on a worker of its class


class Line:
    """Places answers on workers, in order of priority and arrival; belongs to one event loop.

    An answer that waits for a fast worker does not keep a later one from another worker, and a
    later one never takes the place that an earlier one waits for.
    """

    def __init__(
        self,
        workers: Mapping[str, Worker],
        limits: Limits | None = None,
        pools: PoolBook | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self._workers = workers
        self._pools = pools or PoolBook(workers)
        self._tickets: list[Ticket] = []  # by order
        self._numbers = count()
        self._wait_s = 0.0  # moving average of how long placed answers had waited
        self._pass: asyncio.Handle | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._demands = Demands(self._pools)
        self._seats: Counter[Stage] = Counter()  # of answers that are on their way here
        self.asleep_queue = ASLEEP_QUEUE  # answers that may wait while there is no worker

    def demands(self, now_s: float) -> dict[Able, Demand]:
        """What arrives and waits here, by the pools that can serve it."""
        return self._demands.by_pools((ticket.ask for ticket in self._tickets), now_s)

    def __len__(self) -> int:
        return len(self._tickets)

    def queue_time_s(self) -> float:
        """Seconds that a new answer is likely to wait: what the last ones waited, or the oldest
        still waits; 0.0 while nothing waits.
        """
        if not self._tickets:
            return 0.0
        oldest = min(ticket.since_s for ticket in self._tickets)
        return max(self._wait_s, asyncio.get_running_loop().time() - oldest)

    def enter(self, num_answers: int) -> Seat:
        """Places for answers whose prompts are still to be read. Raises `QueueFullError` when all
        queues together have too few, whatever the answers need.
        """
        queue, held = self._room(Stage.QUEUE), self._room(Stage.HELD)
        num_reading = self._seats[Stage.READING]
        left = max(0, queue.left) + max(0, held.left) - num_reading
        if num_answers > left:
            num_waiting = queue.num_waiting + held.num_waiting + num_reading
            raise self._full(num_answers, num_waiting, left + num_waiting)
        return Seat(self._seats, num_answers)

    def require_space(
        self, num_answers: int, needs: Needs | None = None, seat: Seat | None = None
    ) -> None:
        """Raise `QueueFullError` when so many new answers with these needs are more than can start
        or wait. Those held for a pool that is to wake have a queue of their own: while it is full
        others go on, and while theirs is full, so do these. `seat` goes to the queue in question.
        """
        stage = Stage.HELD if needs is not None and self._is_held(needs) else Stage.QUEUE
        room = self._room(stage)
        if num_answers > room.left:
            raise self._full(num_answers, room.num_waiting, room.limit)
        if seat is not None:
            seat.move(stage)

    def _room(self, stage: Stage) -> Room:
        num_held = sum(ticket.awaits_pool for ticket in self._tickets) if self._workers else 0
        if stage is Stage.HELD:
            limit = self.asleep_queue if self._workers and self._pools.sleeping() else 0
            num_waiting = num_held + self._seats[stage]
            return Room(num_waiting, limit, limit - num_waiting)
        num_waiting, limit = len(self._tickets) - num_held, self._max_queued()
        num_free = 0 if num_waiting else self._num_free()
        num_waiting += self._seats[stage]
        return Room(num_waiting, limit, limit - num_waiting + num_free)

    def _full(self, num_answers: int, num_waiting: int, limit: int) -> QueueFullError:
        asked = f"{num_answers} answers are too many now: " if num_answers > 1 else ""
        return QueueFullError(
            f"{asked}{num_waiting} answers wait here, and the limit is {limit}; try again later",
            max(1.0, self.queue_time_s()),
        )

    def _is_held(self, needs: Needs) -> bool:
        """Whether only a pool that has no worker, while others have some, may serve this."""
        workers = self._workers.values()
        return (
            bool(workers)
            and all(needs.why_not(worker) for worker in workers)
            and self._pools.may_come(needs)
        )

    def _num_free(self) -> int:
        """Answers that workers could start now."""
        forecasts = Forecasts(now_s := asyncio.get_running_loop().time())
        return sum(
            worker.concurrency + AHEAD - worker.num_busy(now_s)
            for worker in self._workers.values()
            if forecasts.of(worker).why_full(1, now_s) is None
        )

    def _max_queued(self) -> int:
        if self.limits.max_queued is not None:
            return self.limits.max_queued
        if not self._workers:
            return self.asleep_queue
        return sum(worker.max_waiting for worker in self._workers.values())

    async def place(
        self,
        ask: Ask,
        *,
        priority: int = 0,
        arrived_s: float,
        last_error: Exception | None = None,
        on_placed: OnPlaced | None = None,
    ) -> Job:
        """Wait for a worker; the caller ends the job. Cancelling leaves the queue.

        Raises `RequestError` when no worker could ever serve this, `ApiError` 503 or `last_error`
        when there is none now.
        """
        loop = asyncio.get_running_loop()
        ticket = Ticket(
            ask=ask,
            order=(priority, arrived_s, next(self._numbers)),
            future=loop.create_future(),
            since_s=loop.time(),
            last_error=last_error,
        )
        if self._is_impossible(ticket):  # at once, however many wait
            raise self._no_capable_worker(ask.needs)
        if not ask.is_resumed and last_error is None:
            self._demands.arrive(ask, loop.time())
        bisect.insort(self._tickets, ticket, key=lambda each: each.order)
        self._dispatch()
        try:
            job = await ticket.future
        except asyncio.CancelledError:
            self._leave(ticket)
            raise
        if on_placed is not None and ticket.decision is not None:
            on_placed(ticket.decision, loop.time() - ticket.since_s)
        return job

    def _leave(self, ticket: Ticket) -> None:
        if ticket in self._tickets:
            self._tickets.remove(ticket)
        if ticket.future.done() and not ticket.future.cancelled() and not ticket.future.exception():
            ticket.future.result().end()  # placed in the moment in which the client left
        self.changed()

    def changed(self) -> None:
        """A worker came, went, or has room: look again, once for all that happens in this turn."""
        if self._tickets and self._pass is None:
            self._pass = asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """One pass: place what can start, count what waits against the worker it waits for."""
        if self._pass is not None:
            self._pass.cancel()
            self._pass = None
        loop = asyncio.get_running_loop()
        forecasts = Forecasts(loop.time())
        num_waiting, era = 0, self._pools.era()
        has_room = forecasts.have_room(self._workers.values())
        try:
            for ticket in self._by_turn(forecasts.now_s):
                if num_waiting > LOOK_AHEAD:
                    break
                if ticket.future.done():  # it was cancelled, and leaves as soon as it may run
                    continue
                if not has_room and ticket.is_settled:
                    continue
                if ticket.is_held(era, forecasts.now_s, self.limits.stranded_s):
                    continue
                if self._try(ticket, forecasts):
                    has_room = forecasts.have_room(self._workers.values())
                elif not ticket.awaits_pool:
                    num_waiting += 1
        finally:  # whatever happens to one of them, the others are looked at again
            self._keep_ticking(loop)

    def _by_turn(self, now_s: float) -> tuple[Ticket, ...]:
        if all(ticket.ask.due_s is None for ticket in self._tickets):
            return tuple(self._tickets)
        return tuple(sorted(self._tickets, key=lambda ticket: ticket.turn(now_s)))

    def _try(self, ticket: Ticket, forecasts: Forecasts) -> bool:
        """Place one answer or give it up; False: it goes on waiting, and is counted where."""
        ask = ticket.ask
        if ask.is_resumed:
            waited_s = forecasts.now_s - ticket.since_s
            ask.may_change_class = waited_s >= self.limits.same_class_s
        ticket.decision = decision = choose(ask, self._workers.values(), forecasts)
        worker = decision.worker
        if worker is None:
            return self._is_given_up(ticket, forecasts.now_s)
        ticket.stranded_since_s, ticket.awaits_pool = None, False
        ticket.service_s = decision.service_s(forecasts)
        if not decision.can_start:
            forecasts.of(worker).add(ask.num_prompt, ask.num_answer)
            return False
        job = Job(
            worker=worker,
            num_uncomputed=ask.num_prompt,
            num_expected=ask.num_answer,
            is_bound=self._pools.able(ask.needs, ask.rules) is not None,
        )
        worker.jobs.add(job)
        forecasts.forget(worker)
        waited_s = forecasts.now_s - ticket.since_s
        self._wait_s += 0.2 * (waited_s - self._wait_s)
        self._tickets.remove(ticket)
        ticket.future.set_result(job)
        return True

    def _is_given_up(self, ticket: Ticket, now_s: float) -> bool:
        """No worker can take it: at once the client's fault, or ours after a while."""
        if self._is_impossible(ticket):
            self._tickets.remove(ticket)
            ticket.future.set_exception(self._no_capable_worker(ticket.ask.needs))
            return True
        if ticket.stranded_since_s is None:
            ticket.stranded_since_s = now_s
        if now_s - ticket.stranded_since_s < self.limits.stranded_s:
            return False
        self._tickets.remove(ticket)
        ticket.future.set_exception(ticket.last_error or no_worker())
        return True

    def _is_impossible(self, ticket: Ticket) -> bool:
        """Whether nobody will ever take a new answer; notes who might once a pool wakes."""
        needs = ticket.ask.needs
        is_refused = all(needs.why_not(worker) for worker in self._workers.values())
        ticket.awaits_pool = is_refused and self._pools.may_come(needs)
        ticket.judged_in = self._pools.era()
        is_new = ticket.last_error is None and not ticket.ask.is_resumed
        is_known = bool(self._workers or self._pools.sleeping())
        return is_new and is_refused and not ticket.awaits_pool and is_known

    def _no_capable_worker(self, needs: Needs) -> RequestError:
        return no_capable_worker(needs, list(self._workers.values()), self._pools.say(needs))

    def _keep_ticking(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._tick is not None:
            self._tick.cancel()
        self._tick = loop.call_later(TICK_S, self._dispatch) if self._tickets else None


def no_worker() -> ApiError:
    """The 503 for an answer that nobody can give right now."""
    return ApiError(
        503,
        "No worker can take this request right now; try again shortly.",
        code="no_worker",
        headers=retry_after(5.0),
    )
