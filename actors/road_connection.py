"""One gateway as the worker sees it: its requests, and one message to it per engine step."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..runtime.errors import EngineError, PolypathError
from ..runtime.request import RequestOutput
from .faults import fault_of
from .frames import (
    MAX_FRAME_BYTES,
    PREFIX,
    VERSION,
    Answer,
    Ask,
    Beat,
    Cancel,
    Challenge,
    Farewell,
    Fault,
    FrameError,
    Proof,
    Step,
    Submit,
    ToWorker,
    Welcome,
    encode,
)
from .handshake import is_proved, new_nonce, proof
from .road_end import RoadEnd

if TYPE_CHECKING:
    from .load import WorkerLoad
    from .road_server import RoadServer

logger = logging.getLogger("polypath.road")

LOAD_EVERY_S = 0.1  # to gateways that a step gave nothing


class RoadConnection(RoadEnd):
    """One gateway, a stranger first. When it goes, so do its requests."""

    def __init__(self, server: RoadServer) -> None:
        super().__init__(Proof, server.pulse)
        self.gateway = "?"
        self._server = server
        self._worker = server.worker
        self._nonce = new_nonce()
        self._attempts: dict[int, Attempt] = {}
        self._tokens: list[tuple[str, int, int, int]] = []  # of the step under way
        self._outputs: list[tuple[int, RequestOutput]] = []
        self._last_sent_s = 0.0

    @property
    def num_open(self) -> int:
        """Attempts that have not ended."""
        return len(self._attempts)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.send(Challenge(VERSION, self._nonce))

    def take(self, message: Proof | ToWorker) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Cancel():
                self._cancel(message)
            case Ask():
                self._answer(message)
            case Proof():
                self._greet(message)
            case Beat():
                pass

    def _greet(self, message: Proof) -> None:
        key, ours = self._server.key, self._nonce
        if not is_proved(message.mac, key, "gateway", ours, message.nonce):
            raise FrameError("a wrong proof of the key")
        self.trust(ToWorker, MAX_FRAME_BYTES)
        self.gateway = message.gateway[:64]
        self._server.admit(self)
        mac = proof(key, "worker", ours, message.nonce)
        self.send(Welcome(self._worker.worker_id, mac))
        self.beat()
        if self._server.is_draining:
            self.send(Farewell())

    def _submit(self, message: Submit) -> None:
        number, request = message.attempt, message.request
        if number in self._attempts:
            raise FrameError(f"attempt {number} is used twice")
        attempt = Attempt(self, number, request.id)
        try:
            attempt.key = self._worker.open(request, attempt)
        except PolypathError as error:
            self.send(fault_of(number, error))
            return
        self._attempts[number] = attempt

    def _cancel(self, message: Cancel) -> None:
        attempt = self._attempts.get(message.attempt)
        if attempt is None:
            return  # it ended while the message was on its way
        if message.quietly:
            del self._attempts[message.attempt]
            self._worker.close(attempt.key)
        else:
            self._worker.cancel_attempt(attempt.key)

    def _answer(self, message: Ask) -> None:
        asked = {
            "describe": self._worker.describe,
            "stats": self._worker.stats,
            "hold": lambda: self._server.hold(True),
            "release": lambda: self._server.hold(False),
        }.get(message.what)
        if asked is None:
            raise FrameError("a question that no gateway asks")
        value: dict[str, Any] | None = None  # JSON
        error: str | None = None
        try:
            value = asked()
        except RuntimeError:  # the engine's thread changed what was being read
            logger.exception("%s could not be answered", message.what)
            error = f"the worker could not answer {message.what}; see its log"
        self.send(Answer(message.number, value, error))

    def put(self, attempt: Attempt, output: RequestOutput) -> None:
        """Keep what a step gave one attempt until `flush`."""
        if is_plain(output) and output.cached_tokens == attempt.cached_tokens:
            token = (attempt.request_id, attempt.number, output.position, output.token_ids[0])
            self._tokens.append(token)
        else:
            attempt.cached_tokens = output.cached_tokens
            if output.request_id != attempt.request_id:  # the engine knows it by another name
                output = replace(output, request_id=attempt.request_id)
            self._outputs.append((attempt.number, output))
        if output.finish_reason is not None:
            del self._attempts[attempt.number]

    def fail(self, attempt: Attempt, error: EngineError) -> None:
        """The engine has failed an attempt."""
        del self._attempts[attempt.number]
        self.send(fault_of(attempt.number, error))

    def flush(self, load: WorkerLoad | None) -> None:
        """Send what the step gave, all in one message; the load alone now and then."""
        now_s = time.monotonic()
        if not self._tokens and not self._outputs and now_s - self._last_sent_s < LOAD_EVERY_S:
            return
        self._last_sent_s = now_s
        step = Step(load, self._tokens, self._outputs)
        self._tokens, self._outputs = [], []
        frame = encode(step)
        if len(frame) <= MAX_FRAME_BYTES + PREFIX:
            self.send_frame(frame)
        else:
            self._send_apart(step)

    def _send_apart(self, step: Step) -> None:
        """Too much for one frame: each output alone, an error for one that still is too much."""
        self.send(Step(step.load, step.tokens, []))
        for number, output in step.outputs:
            frame = encode(Step(None, [], [(number, output)]))
            if len(frame) <= MAX_FRAME_BYTES + PREFIX:
                self.send_frame(frame)
                continue
            text = f"{len(frame)} bytes of log-probabilities are too many at once; ask for fewer"
            self.send(Fault(number, "request", text, "prompt_logprobs"))
            if (attempt := self._attempts.pop(number, None)) is not None:
                self._worker.close(attempt.key)

    def beat(self) -> None:
        self.send(Step(self._worker.load(), [], []))

    def lost(self, why: str) -> None:
        attempts, self._attempts = self._attempts, {}
        for attempt in attempts.values():
            self._worker.close(attempt.key)
        self._server.forget(self, why)


class Attempt:
    """A request of one gateway as the worker's outlet."""

    __slots__ = ("cached_tokens", "connection", "key", "number", "request_id")

    def __init__(self, connection: RoadConnection, number: int, request_id: str) -> None:
        self.connection = connection
        self.number = number
        self.request_id = request_id
        self.key = ""  # the engine's name of it
        self.cached_tokens = 0  # as the gateway knows them

    def put(self, output: RequestOutput) -> None:
        self.connection.put(self, output)

    def fail(self, error: EngineError) -> None:
        self.connection.fail(self, error)


def is_plain(output: RequestOutput) -> bool:
    """One token and nothing else to tell, which is nearly every output."""
    return (
        len(output.token_ids) == 1
        and output.finish_reason is None
        and not output.logprobs
        and output.prompt_logprobs is None
    )
