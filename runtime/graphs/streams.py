"""Streams of a GPU as clocks, for tests without one: says when work could overtake work that it
needs.

Work of one stream runs in order; between streams, and between host and streams, only events and
waiting order it. Nothing runs late here; it is noted what a stream knows to be done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .mechanism import ReplayError

Clock = dict[int, int]
"""How much of each stream, by its number, is known to be done."""


class Stream:
    """A queue of work. What it knows: its own work, and that of streams it waited for."""

    def __init__(self, streams: Streams, number: int) -> None:
        self.number = number
        self.known: Clock = {}
        self._streams = streams

    def wait_event(self, event: Event) -> None:
        """Later work of this stream comes after the event."""
        _merge(self.known, event.known)

    def wait_stream(self, stream: Stream) -> None:
        """Later work of this stream comes after all that the other holds now."""
        _merge(self.known, stream.known)

    def synchronize(self) -> None:
        """The host waits, so all later work comes after this stream's."""
        _merge(self._streams.host, self.known)


class Event:
    """A point in a stream."""

    def __init__(self, streams: Streams) -> None:
        self.known: Clock = {}
        self._streams = streams

    def record(self, stream: Stream | None = None) -> None:
        """Stand after all that the stream holds now."""
        self.known = dict((stream or self._streams.current).known)

    def synchronize(self) -> None:
        """The host waits for it."""
        _merge(self._streams.host, self.known)


class Streams:
    """All streams of a device, and which stream wrote and read each tensor last."""

    def __init__(self) -> None:
        self.host: Clock = {}
        self._count = 0
        self.default = self.new_stream()
        self.current = self.default
        self._written: dict[int, tuple[int, int]] = {}  # storage -> stream, its clock
        self._read: dict[int, tuple[int, int]] = {}  # by a graph

    def new_stream(self) -> Stream:
        """One more stream."""
        self._count += 1
        return Stream(self, self._count)

    def new_event(self) -> Event:
        """An event that nothing comes before yet."""
        return Event(self)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Work goes to that stream."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def write(self, tensor: torch.Tensor) -> None:
        """Work that writes a tensor; ReplayError where a graph may still read it."""
        stamp = self._launch()
        key = tensor.untyped_storage().data_ptr()
        if not self._is_known(self._read.get(key)):
            raise ReplayError(
                f"stream {self.current.number} writes an input of a graph that may still run on "
                f"stream {self._read[key][0]}: let it wait for that"
            )
        self._written[key] = stamp

    def replay(self, inputs: Iterable[torch.Tensor]) -> None:
        """A graph that reads these tensors; ReplayError where one may not be written yet."""
        stamp = self._launch()
        for position, tensor in enumerate(inputs):
            key = tensor.untyped_storage().data_ptr()
            if not self._is_known(self._written.get(key)):
                raise ReplayError(
                    f"input {position} is written on stream {self._written[key][0]}, and stream "
                    f"{self.current.number}, where the graph runs, does not wait for that"
                )
            self._read[key] = stamp

    def watching(self) -> TorchDispatchMode:
        """A context in which every operation that writes a tensor counts as work."""
        return _Writes(self)

    def _launch(self) -> tuple[int, int]:
        """One more piece of work on the current stream: after what the host waited for."""
        stream = self.current
        _merge(stream.known, self.host)
        stream.known[stream.number] = stream.known.get(stream.number, 0) + 1
        return stream.number, stream.known[stream.number]

    def _is_known(self, stamp: tuple[int, int] | None) -> bool:
        """Whether the current stream comes after that work."""
        return stamp is None or self.current.known.get(stamp[0], 0) >= stamp[1]


class _Writes(TorchDispatchMode):
    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """See `guard._Operations`."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # torch's own signature
        kwargs = kwargs or {}
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            if isinstance(given, torch.Tensor):
                self._streams.write(given)
        return func(*args, **kwargs)


def _merge(clock: Clock, other: Clock) -> None:
    for number, done in other.items():
        clock[number] = max(done, clock.get(number, 0))
