"""One end of a road: bytes to messages and back, signs of life, and the end when they stop."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, cast

from .frames import MAX_GREETING_BYTES, FrameError, Frames, Message, encode

logger = logging.getLogger("polypath.road")

MAX_BUFFERED_BYTES = 64 * 1024 * 1024  # two of the largest frames; who reads slower is dropped


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulse:
    """How often an end shows that it lives, and how long it believes in a silent other."""

    beat_s: float = 1.0
    max_silent_beats: int = 6  # counted, not timed: a process that was stopped hears its mail first
    greeting_s: float = 5.0  # to prove knowledge of the key


class RoadEnd(asyncio.Protocol, ABC):
    """What both ends share. Belongs to one event loop; every way out leads through `lost`."""

    def __init__(self, greetings: Any, pulse: Pulse) -> None:  # a union of message types
        self._frames = Frames(greetings, MAX_GREETING_BYTES)
        self._pulse = pulse
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._silent_beats = 0
        self._has_sent = False  # since the last beat
        self._why = "the other side closed the connection"

    @abstractmethod
    def take(self, message: Any) -> None:  # one of the expected messages
        """Act on a message. Raises FrameError when it has no business here."""
        ...

    @abstractmethod
    def beat(self) -> None:
        """Send something small: nothing was sent for a while."""
        ...

    @abstractmethod
    def lost(self, why: str) -> None:
        """The connection is over; called once."""
        ...

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._call_later(self._pulse.greeting_s, self._greeting_is_late)

    def data_received(self, data: bytes) -> None:
        self._silent_beats = 0
        try:
            self._frames.feed(data)
            while self._transport is not None and (message := self._frames.next()) is not None:
                self.take(message)
        except FrameError as error:
            self.drop(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None and exc is not None:
            self._why = f"the connection broke ({exc})"
        self._transport = None
        self.lost(self._why)

    def trust(self, expected: Any, limit: int) -> None:  # a union of message types
        """The other side has proved itself: from here on these messages, and beats."""
        self._frames.expect(expected, limit)
        self._call_later(self._pulse.beat_s, self._on_beat)

    def send(self, message: Message) -> None:
        """Queue a message; nothing when the connection is over, its end when nobody reads."""
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        """The same for a message that is encoded."""
        if self._transport is None:
            return
        if self._transport.get_write_buffer_size() + len(frame) > MAX_BUFFERED_BYTES:
            self.drop(f"{MAX_BUFFERED_BYTES} bytes wait and the other side does not read them")
            return
        self._has_sent = True
        self._transport.write(frame)

    @property
    def is_open(self) -> bool:
        """Whether something can still be sent."""
        return self._transport is not None

    def drop(self, why: str) -> None:
        """End the connection at once; `lost` is called soon."""
        if self._transport is not None:
            self._why = why
            transport, self._transport = self._transport, None
            transport.abort()

    def close(self, why: str) -> None:
        """End the connection after what has been sent."""
        if self._transport is not None:
            self._why = why
            transport, self._transport = self._transport, None
            transport.close()

    def _call_later(self, seconds: float, function: Any) -> None:  # without arguments
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, function)

    def _greeting_is_late(self) -> None:
        self.drop(f"no proof of the key within {self._pulse.greeting_s:g} s")

    def _on_beat(self) -> None:
        if self._transport is None:
            return
        self._silent_beats += 1
        if self._silent_beats > self._pulse.max_silent_beats:
            silence_s = self._silent_beats * self._pulse.beat_s
            self.drop(f"no sign of life for {silence_s:.1f} s")
            return
        if not self._has_sent:
            self.beat()
        self._has_sent = False
        self._call_later(self._pulse.beat_s, self._on_beat)
