"""What travels between a gateway and a worker: length-prefixed msgpack frames, never pickle.

A frame is four bytes of length (big-endian) and one message. Decoding yields only the types below;
whatever else arrives is a `FrameError`, and the connection it came over is closed.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields
from typing import Any

import msgspec

from ..runtime.request import (
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    StepCount,
    TokenLogprob,
)
from .load import WorkerLoad

PREFIX = 4  # bytes of length before each message
MAX_FRAME_BYTES = 32 * 1024 * 1024  # the log-probabilities of 128k prompt tokens need 11 MB
MAX_GREETING_BYTES = 512  # until the other side has proved that it knows the key
UINT64 = 2**64


class FrameError(Exception):
    """What arrived is not a frame of ours."""


class Challenge(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """Worker to gateway, first: prove that you know the key."""

    version: str
    nonce: bytes


class Proof(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """Gateway to worker: here is my proof; now yours."""

    gateway: str
    nonce: bytes
    mac: bytes


class Welcome(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """Worker to gateway: my proof. From here on frames may be large."""

    worker: str
    mac: bytes


class Submit(msgspec.Struct, array_like=True, frozen=True, tag=4):
    """Gateway to worker: run this. `attempt` is never used twice on a connection."""

    attempt: int
    request: Request


class Cancel(msgspec.Struct, array_like=True, frozen=True, tag=5):
    """Gateway to worker: end an attempt. With `quietly` not even its last output is wanted."""

    attempt: int
    quietly: bool


class Ask(msgspec.Struct, array_like=True, frozen=True, tag=6):
    """Gateway to worker: `describe`, `stats`, `hold` or `release`."""

    number: int
    what: str


class Beat(msgspec.Struct, array_like=True, frozen=True, tag=7):
    """Gateway to worker: I am here. The worker says so by an empty `Step`."""


class Step(msgspec.Struct, array_like=True, frozen=True, tag=8):
    """Worker to gateway: all that one engine step gave the requests of this connection."""

    load: WorkerLoad | None
    tokens: list[tuple[str, int, int, int]]  # request, attempt, position, token id
    outputs: list[tuple[int, RequestOutput]]  # attempt, and what does not fit into `tokens`


class Fault(msgspec.Struct, array_like=True, frozen=True, tag=9):
    """Worker to gateway: an attempt ends with this error."""

    attempt: int
    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float = 0.0


class Answer(msgspec.Struct, array_like=True, frozen=True, tag=10):
    """Worker to gateway: what `Ask` asked for; `error` when there is none."""

    number: int
    value: Any  # JSON
    error: str | None = None


class Farewell(msgspec.Struct, array_like=True, frozen=True, tag=11):
    """Worker to gateway: send nothing new, I am leaving; what runs goes on for a while."""


ToWorker = Submit | Cancel | Ask | Beat
ToGateway = Step | Fault | Answer | Farewell
Greeting = Challenge | Proof | Welcome
Message = ToWorker | ToGateway | Greeting

_encoder = msgspec.msgpack.Encoder()


def _version() -> str:
    """Both ends must know the same fields: msgpack would drop an unknown one without a word."""
    shapes = (Request, SamplingParams, RequestOutput, TokenLogprob, StepCount, WorkerLoad)
    names = [f"{shape.__name__}.{field.name}" for shape in shapes for field in fields(shape)]
    names += [f"FinishReason.{reason.value}" for reason in FinishReason]
    return f"2-{hashlib.sha256(' '.join(names).encode()).hexdigest()[:12]}"


VERSION = _version()


def encode(message: Message) -> bytes:
    """A message as a frame. Raises OverflowError when one of its integers has over 64 bits."""
    body = _encoder.encode(message)
    return len(body).to_bytes(PREFIX, "big") + body


class Frames:
    """Cuts a stream of bytes into messages of the types that are expected."""

    def __init__(self, types: Any, limit: int) -> None:  # a union of the messages above
        self._buffer = bytearray()
        self.expect(types, limit)

    def expect(self, types: Any, limit: int) -> None:  # a union of the messages above
        """From the next message on: these types, of at most `limit` bytes."""
        self._decoder = msgspec.msgpack.Decoder(types)
        self._limit = limit

    def feed(self, data: bytes) -> None:
        """More bytes have come."""
        self._buffer += data

    def next(self) -> Any:  # a message of the expected types, or None
        """The next whole message. Raises FrameError; nothing that follows it can be read."""
        if len(self._buffer) < PREFIX:
            return None
        size = int.from_bytes(self._buffer[:PREFIX], "big")
        if size > self._limit:
            raise FrameError(f"a frame of {size} bytes; at most {self._limit} are taken here")
        end = PREFIX + size
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[PREFIX:end])
        del self._buffer[:end]
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:  # ValidationError is one of them
            raise FrameError(f"a frame that cannot be read: {str(error)[:200]}") from None
