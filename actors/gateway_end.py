"""The gateway's end of a road: attempts by number, and what the worker last said of itself."""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import count
from typing import Any

from ..runtime.errors import EngineError, PolypathError, RequestError
from ..runtime.request import Request, RequestOutput
from .faults import error_of
from .frames import (
    MAX_FRAME_BYTES,
    UINT64,
    VERSION,
    Answer,
    Ask,
    Beat,
    Cancel,
    Challenge,
    Farewell,
    Fault,
    FrameError,
    Greeting,
    Proof,
    Step,
    Submit,
    ToGateway,
    Welcome,
    encode,
)
from .handshake import is_proved, new_nonce, proof
from .load import WorkerLoad
from .road_end import Pulse, RoadEnd


class GatewayEnd(RoadEnd):
    """What `RoadLink` stands on."""

    def __init__(self, key: bytes, gateway: str, pulse: Pulse) -> None:
        super().__init__(Challenge | Welcome, pulse)
        self.worker = "?"
        self.load: WorkerLoad | None = None
        self.why = ""
        self.num_late = 0
        self.is_greeted = asyncio.Event()  # or refused
        self.is_leaving = asyncio.Event()
        self.is_gone = asyncio.Event()
        self._key = key
        self._gateway = gateway
        self._nonces = (b"", new_nonce())  # the worker's and ours
        self._numbers = count(1)
        self._attempts: dict[int, Attempt] = {}
        self._questions: dict[int, asyncio.Future[dict[str, Any]]] = {}

    def take(self, message: Greeting | ToGateway) -> None:
        match message:
            case Step():
                self._take_step(message)
            case Fault():
                self._take_fault(message)
            case Answer():
                self._take_answer(message)
            case Farewell():
                self.why = "the worker is leaving"
                self.is_leaving.set()
            case Challenge():
                self._prove(message)
            case Welcome():
                self._take_welcome(message)
            case Proof():
                raise FrameError("a proof from the wrong side")

    def _prove(self, message: Challenge) -> None:
        if message.version != VERSION:
            raise FrameError(f"the worker speaks version {message.version}, not {VERSION}")
        self._nonces = (message.nonce, self._nonces[1])
        mac = proof(self._key, "gateway", *self._nonces)
        self.send(Proof(self._gateway, self._nonces[1], mac))

    def _take_welcome(self, message: Welcome) -> None:
        if not is_proved(message.mac, self._key, "worker", *self._nonces):
            raise FrameError("what listens there does not know the worker's key")
        self.worker = message.worker
        self.trust(ToGateway, MAX_FRAME_BYTES)
        self.is_greeted.set()

    def submit(self, request: Request) -> Attempt:
        """Send a request. Raises EngineError, or RequestError for numbers beyond 64 bits."""
        self._require_open()
        if any(open_.request_id == request.id for open_ in self._attempts.values()):
            raise RequestError(f"a request with id {request.id!r} is running already", "id")
        attempt = Attempt(next(self._numbers), request)
        try:
            frame = encode(Submit(attempt.number, request))
        except OverflowError:
            raise RequestError(f"a number of this request is not below {UINT64}") from None
        if len(frame) > MAX_FRAME_BYTES:
            raise RequestError(f"the request has {len(frame)} bytes; it must be smaller", "prompt")
        self._attempts[attempt.number] = attempt
        self.send_frame(frame)
        return attempt

    def abandon(self, attempt: Attempt) -> None:
        """Nobody reads this attempt any more: if it still runs, it need not."""
        if self._attempts.pop(attempt.number, None) is not None:
            self.send(Cancel(attempt.number, quietly=True))

    def cancel(self, request_id: str) -> None:
        """End a request; its last output still comes."""
        self._require_open()
        for attempt in self._attempts.values():
            if attempt.request_id == request_id:
                self.send(Cancel(attempt.number, quietly=False))

    async def ask(self, what: str) -> dict[str, Any]:  # JSON
        """A question and its answer. Raises EngineError."""
        self._require_open()
        number = next(self._numbers)
        future = asyncio.get_running_loop().create_future()
        self._questions[number] = future
        self.send(Ask(number, what))
        try:
            return await future
        finally:
            self._questions.pop(number, None)

    def _take_step(self, step: Step) -> None:
        self.load = step.load or self.load
        for request_id, number, position, token_id in step.tokens:
            attempt = self._attempts.get(number)
            if attempt is None or attempt.request_id != request_id:
                self.num_late += 1
                continue
            self._give(
                attempt,
                RequestOutput(
                    request_id=request_id,
                    position=position,
                    token_ids=(token_id,),
                    cached_tokens=attempt.cached_tokens,
                ),
            )
        for number, output in step.outputs:
            attempt = self._attempts.get(number)
            if attempt is None:
                self.num_late += 1
                continue
            attempt.cached_tokens = output.cached_tokens
            self._give(attempt, output)

    def _give(self, attempt: Attempt, output: RequestOutput) -> None:
        if output.position != attempt.position:
            self.abandon(attempt)
            attempt.put(
                EngineError(
                    f"the worker sent token {output.position} where {attempt.position} was next"
                )
            )
            return
        attempt.position += len(output.token_ids)
        if output.finish_reason is not None:
            del self._attempts[attempt.number]
        attempt.put(output)

    def _take_fault(self, fault: Fault) -> None:
        attempt = self._attempts.pop(fault.attempt, None)
        if attempt is not None:
            attempt.put(error_of(fault))

    def _take_answer(self, answer: Answer) -> None:
        future = self._questions.get(answer.number)
        if future is None or future.done():
            return
        if answer.error is not None:
            future.set_exception(EngineError(answer.error))
        else:
            future.set_result(answer.value)

    def beat(self) -> None:
        self.send(Beat())

    def _require_open(self) -> None:
        if not self.is_open:
            raise EngineError(self._gone_text())

    def _gone_text(self) -> str:
        return f"the worker died or cannot be reached ({self.why or self._why})"

    def lost(self, why: str) -> None:
        self.why = why
        attempts, self._attempts = self._attempts, {}
        for attempt in attempts.values():
            attempt.put(EngineError(self._gone_text()))
        for future in self._questions.values():
            if not future.done():
                future.set_exception(EngineError(self._gone_text()))
        for event in (self.is_greeted, self.is_leaving, self.is_gone):
            event.set()


class Attempt:
    """A request on its way through one worker: what has come for it and was not read yet."""

    __slots__ = ("_items", "_waiter", "cached_tokens", "number", "position", "request_id")

    def __init__(self, number: int, request: Request) -> None:
        self.number = number
        self.request_id = request.id
        self.position = len(request.output_ids)  # of the next token
        self.cached_tokens = 0
        self._items: deque[RequestOutput | PolypathError] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: RequestOutput | PolypathError) -> None:
        """What came; nothing comes after an error or a last output."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> RequestOutput:
        """What comes next. Raises the error that ended it."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        item = self._items.popleft()
        if isinstance(item, PolypathError):
            raise item
        return item
