"""All engine requests of one API request: started together, merged as they come, ended together."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ..runtime.errors import QueueFullError
from ..runtime.request import FinishReason, RequestOutput
from .answer import Answer, Piece
from .resume import Attempts
from .route_wish import ROUTE, RouteWish

if TYPE_CHECKING:
    from .gateway import Gateway
    from .needs import Needs
    from .router import Decision
    from .seats import Seat
    from .served_model import ServedModel
    from .served_worker import Worker

MAX_ROUTE_HEADER = 4096  # characters; proxies refuse large headers


class Generation:
    """Runs `answers` on the workers that the router picks; leaving the context cancels whatever
    still waits or runs.

    Use: `async with generation:`, then `await generation.begin()`, then iterate `batches()`. The
    first error of any answer ends all of them and is raised there.
    """

    def __init__(
        self,
        gateway: Gateway,
        model: ServedModel,
        answers: Sequence[Answer],
        *,
        arrived_s: float,  # of the monotonic clock
        wish: RouteWish | None = None,
        seat: Seat,  # one for each answer
    ) -> None:
        self.model = model
        self.answers = tuple(answers)
        self._wish = wish or RouteWish()
        self._gateway = gateway
        self._settings = gateway.settings
        self._metrics = gateway.metrics
        self._arrived_s = arrived_s
        self._seat = seat
        self._worker: Worker | None = None  # the first that gave a token
        self._attempts: list[Attempts] = []
        self._placed = asyncio.Event()
        self._inbox: asyncio.Queue[list[Piece] | BaseException] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._gateway.open_requests.enter(self)
        try:
            needs = max(map(self._needs, self.answers), key=lambda each: each.num_tokens)
            self.model.line.require_space(len(self.answers), needs, self._seat)
        except QueueFullError:
            self._gateway.open_requests.leave(self)
            self._metrics.count_refused(self.model.name, "queue_full")
            raise
        self._attempts = [self._begin(answer) for answer in self.answers]
        self._tasks = [
            asyncio.create_task(self._generate(answer, attempts))
            for answer, attempts in zip(self.answers, self._attempts, strict=True)
        ]
        for task in self._tasks:
            task.add_done_callback(self._hand_over_error)
        return self

    def _needs(self, answer: Answer) -> Needs:
        return self._wish.needs(len(answer.request.prompt_ids), answer.request.sampling)

    def leave_seat(self) -> None:
        """Give back the places of answers that did not come into the queue, and will not."""
        self._seat.leave()

    @property
    def is_waiting(self) -> bool:
        """Whether no worker has any of its answers, or had."""
        return self.worker is None

    def fail(self, error: BaseException) -> None:
        """End it with this, wherever it is."""
        self._inbox.put_nowait(error)

    def _begin(self, answer: Answer) -> Attempts:
        request = answer.request
        return Attempts(
            request,
            self._needs(answer),
            line=self.model.line,
            rules=self._wish.rules(self.model.rules),
            lengths=self.model.lengths,
            settings=self._settings,
            metrics=self._metrics,
            model=self.model.name,
            arrived_s=self._arrived_s,
            goal_s=self._wish.goal_s,
            on_change=self._note_change,
        )

    def _note_change(self) -> None:
        """An answer was given to a worker, or came back from it."""
        if any(attempts.is_running for attempts in self._attempts):
            self._placed.set()
        else:
            self._placed.clear()

    @property
    def worker(self) -> Worker | None:
        """The first that gave a token; until then one that was chosen, None while all wait."""
        if self._worker is not None:
            return self._worker
        chosen = (attempts.worker for attempts in self._attempts)
        return next((worker for worker in chosen if worker is not None), None)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._gateway.open_requests.leave(self)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.leave_seat()
        self._metrics.observe_request(self.model.name, time.monotonic() - self._arrived_s)

    async def begin(self) -> None:
        """Wait until a worker has an answer, and then for its first tokens, neither for too long:
        an error until here still has its own status.
        """
        first = asyncio.ensure_future(self._inbox.get())
        latest_s = time.monotonic() + self._settings.queue_headers_after_s
        try:
            while not first.done() and time.monotonic() < latest_s:
                await self._wait_for_place(first, latest_s - time.monotonic())
                await asyncio.wait({first}, timeout=self._settings.headers_after_s)
                if self._placed.is_set():  # and not refused again by a full worker
                    break
            if not first.done():
                return
        finally:
            first.cancel()
        pieces, error = self._collect(first.result())
        if error is not None and not pieces:
            raise error
        self._put_back(pieces, error)

    async def has_news(self, timeout_s: float) -> bool:
        """Whether `batches` would give something, or raise, within `timeout_s`."""
        first = asyncio.ensure_future(self._inbox.get())
        try:
            await asyncio.wait({first}, timeout=timeout_s)
        finally:
            first.cancel()
        if first.done() and not first.cancelled():
            self._put_back(*self._collect(first.result()))
            return True
        return False

    def _put_back(self, pieces: list[Piece], error: BaseException | None) -> None:
        if pieces:
            self._inbox.put_nowait(pieces)
        if error is not None:
            self._inbox.put_nowait(error)

    async def _wait_for_place(
        self, first: asyncio.Future[list[Piece] | BaseException], timeout_s: float
    ) -> None:
        placed = asyncio.ensure_future(self._placed.wait())
        try:
            await asyncio.wait(
                {first, placed}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            placed.cancel()

    async def batches(self) -> AsyncIterator[list[Piece]]:
        """Pieces of all answers, everything that is ready at once; ends when every answer has."""
        num_left = len(self.answers)
        while num_left:
            pieces, error = self._collect(await self._inbox.get())
            num_left -= sum(piece.finish_reason is not None for piece in pieces)
            if pieces:
                yield pieces
            if error is not None:
                raise error

    def _collect(
        self, item: list[Piece] | BaseException
    ) -> tuple[list[Piece], BaseException | None]:
        """`item` and all that is ready behind it, up to the first error."""
        pieces: list[Piece] = []
        while not isinstance(item, BaseException):
            pieces += item
            if self._inbox.empty():
                return pieces, None
            item = self._inbox.get_nowait()
        return pieces, item

    def _hand_over_error(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._inbox.put_nowait(error)

    async def _generate(self, answer: Answer, attempts: Attempts) -> None:
        last_s: float | None = None

        def take(output: RequestOutput) -> bool:
            nonlocal last_s
            self._worker = self._worker or attempts.worker
            if output.token_ids:
                last_s = self._observe(last_s)
            self._inbox.put_nowait(answer.take(output))
            return answer.is_stopped

        self._seat.rise()  # `run` goes into the queue before it waits for anything
        answer.steps = await attempts.run(take)
        if answer.finish_reason is None:
            self._inbox.put_nowait([answer.close(FinishReason.STOP.value)])
        self.model.lengths.observe(answer.num_tokens)

    def _observe(self, last_s: float | None) -> float:
        now_s = time.monotonic()
        if last_s is None:
            self._metrics.observe_first_token(self.model.name, now_s - self._arrived_s)
        else:
            self._metrics.observe_inter_token(self.model.name, now_s - last_s)
        return now_s

    def route_headers(self) -> dict[str, str]:
        """What is known of the way when the headers leave; the whole way is `polypath.trail`."""
        worker = self.worker
        if worker is None:
            return {}  # it still waits in the queue
        headers = {"x-polypath-worker": worker.id, "x-polypath-path": worker.path_header}
        decided = (attempts for attempts in self._attempts if attempts.decision is not None)
        first = next(decided, None)
        if self._wish.explains and first is not None and first.decision is not None:
            headers[ROUTE] = _route_header(first.decision, first.waited_s)
        return headers

    def trail(self) -> list[str]:
        """The workers that had a part in these answers, in the order in which they came in."""
        visits = [visit for attempts in self._attempts for visit in attempts.visits]
        return list(dict.fromkeys(visit.worker.id for visit in visits))

    def resumed(self) -> list[dict[str, Any]]:  # JSON
        """Every change of worker in the middle of an answer, and what changed with it."""
        return [
            {"index": answer.index, **visit.to_json(before)}
            for answer, attempts in zip(self.answers, self._attempts, strict=True)
            for before, visit in zip(attempts.visits, attempts.visits[1:], strict=False)
        ]

    def steps(self) -> list[dict[str, object]]:
        """What really served: forward passes by mode, runner and reason, over all answers."""
        counts: dict[tuple[str, str, str], int] = {}
        for answer in self.answers:
            for step in answer.steps:
                key = (step.mode, step.runner, step.reason)
                counts[key] = counts.get(key, 0) + step.steps
        return [
            {"mode": mode, "runner": runner, "reason": reason, "steps": count}
            for (mode, runner, reason), count in sorted(counts.items())
        ]


def _route_header(decision: Decision, waited_s: float) -> str:
    """The decision as JSON in ASCII; of very many workers only as many as fit."""
    said = decision.to_json(waited_s)
    text = json.dumps(said, separators=(",", ":"))
    while len(text) > MAX_ROUTE_HEADER and said["candidates"]:
        said["candidates"].pop()
        said["left_out"] = said.get("left_out", 0) + 1
        text = json.dumps(said, separators=(",", ":"))
    return text
