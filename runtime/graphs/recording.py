"""A mechanism for tests: behaves as a GPU's graphs do, on any device and any operations.

A capture computes nothing that counts: a replay runs every noted operation again on the tensors
noted then, padded rows included. Launches of Triton kernels are noted as a GPU's graph has them, by
the addresses of their tensors. What no GPU captures is refused (forbidden.py). It notices inputs
that have moved, memory that was freed under a launch, and where it is given streams, work that is
out of order; `poison` overwrites all that the graphs compute.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from ...kernels.cpu.library import Library, argument_types
from .forbidden import check_operation, no_host_buffers, no_waiting
from .guard import CaptureGuard
from .mechanism import Break, CaptureError, Forward, ReplayError
from .streams import Streams
from .weak_tensor import WeakTensor

if TYPE_CHECKING:
    from ...kernels.triton.launches import Launch


class Notes:
    """Every operation between `open` and `close`, to be run again."""

    def __init__(self, library: Library | None = None) -> None:
        self.calls: list[Callable[[], object]] = []
        self.made: list[torch.Tensor] = []  # everything that the calls compute
        self.launches: list[Launch] = []  # of Triton kernels, which hold `WeakTensor`s
        self._held: list[torch.Tensor] = []  # and everything that they point to
        self._addresses: set[int] = set()
        self._library = library
        self._open = ExitStack()

    def open(self) -> None:
        """Note from now on."""
        self._open.enter_context(no_waiting())
        self._open.enter_context(no_host_buffers())
        if "triton" in sys.modules:  # every kernel ran once before, to warm up
            from ...kernels.triton.launches import noting

            self._open.enter_context(noting(self._launch))
        if self._library is not None:
            self._open.enter_context(self._library.recording(self._note))
        guard = CaptureGuard(empty=self._empty, addressed=self._addressed, other=self._other)
        self._open.enter_context(guard)

    def close(self) -> None:
        """Note nothing any more."""
        self._open.close()

    def run(self) -> None:
        """All of them again."""
        for call in self.calls:
            call()

    def poison(self) -> None:
        """NaN in all floats that the calls compute."""
        for tensor in self.made:
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))

    def _empty(self, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.zeros(size, dtype=dtype)  # a capture that computes leaves no NaN behind
        self.made.append(tensor)
        return tensor

    def _addressed(self, tensor: torch.Tensor) -> None:
        self._addresses.add(tensor.data_ptr())
        self._held.append(tensor)

    def _note(self, name: str, arguments: tuple[Any, ...]) -> None:
        assert self._library is not None, "a library notes"
        for position, (value, kind) in enumerate(zip(arguments, argument_types(name), strict=True)):
            if kind is ctypes.c_void_p and value and value not in self._addresses:
                raise CaptureError(
                    f"argument {position} of {name} is an address that no tensor gave during the "
                    "capture: what lies there could be freed before a replay"
                )
        function: Callable[..., Any] = self._library.quick[name]
        self.calls.append(lambda: function(*arguments))

    def _launch(self, launch: Launch) -> None:
        weak = launch.mapped(lambda v: WeakTensor(v) if isinstance(v, torch.Tensor) else v)
        self.launches.append(weak)
        self.calls.append(lambda: resolved(weak).run())

    def _other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_operation(func, args, kwargs)
        result = func(*args, **kwargs)
        gives_new = any(returned.alias_info is None for returned in func._schema.returns)
        if func._schema.is_mutable and not gives_new:
            self.calls.append(lambda: func(*args, **kwargs))
            return result
        results = (result,) if isinstance(result, torch.Tensor) else tuple(result or ())
        if not results or not all(isinstance(r, torch.Tensor) for r in results):
            raise CaptureError(f"{func} returns no tensor, so a replay could not run it again")
        self.made += results
        self.calls.append(lambda: _write(results, func(*args, **kwargs)))
        return result


def resolved(launch: Launch) -> Launch:
    """A noted launch with tensors in their places. Raises ReplayError."""
    return launch.mapped(lambda v: v.tensor() if isinstance(v, WeakTensor) else v)


def _write(tensors: Sequence[torch.Tensor], values: Any) -> None:
    given = (values,) if isinstance(values, torch.Tensor) else values
    for tensor, value in zip(tensors, given, strict=True):
        tensor.copy_(value)


class RecordedGraph:
    """See `CapturedGraph`."""

    num_bytes = 0

    def __init__(
        self,
        rows: int,
        parts: Sequence[Notes | Break],
        inputs: Sequence[torch.Tensor],
        outputs: tuple[torch.Tensor, ...],
        streams: Streams | None,
    ) -> None:
        self.rows = rows
        self.outputs = outputs
        self._parts = tuple(parts)
        self._addresses = tuple(t.data_ptr() for t in inputs)
        self._streams = streams

    @property
    def launches(self) -> list[Launch]:
        """Of Triton kernels, in order, with their tensors. Raises ReplayError for a freed one."""
        noted = [part.launches for part in self._parts if isinstance(part, Notes)]
        return [resolved(launch) for launches in noted for launch in launches]

    @torch.inference_mode()
    def replay(self, rows: int, inputs: Sequence[torch.Tensor]) -> None:
        """Run all calls over all rows of the graph."""
        if rows > self.rows:
            raise ReplayError(f"{rows} rows were given to a graph of {self.rows}")
        if tuple(t.data_ptr() for t in inputs) != self._addresses:
            raise ReplayError("an input has moved since the graph was captured")
        if self._streams is not None:
            self._streams.replay(inputs)
        for part in self._parts:
            if isinstance(part, Notes):
                part.run()
            else:
                part(rows)


class Recording:
    """See `GraphMechanism`."""

    name = "recording"
    pads = True
    reads_memory = False
    num_bytes = 0

    def __init__(self, library: Library | None = None, streams: Streams | None = None) -> None:
        self._library = library
        self._streams = streams
        self._all: list[Notes] = []
        self._parts: list[Notes | Break] = []
        self._notes: Notes | None = None  # of the part that is being captured
        self._is_breakable = False

    def warm_up(self, forward: Forward, *, is_breakable: bool) -> None:
        """Run it once; breaks have no live rows."""
        forward()

    def begin(self, rows: int, inputs: Sequence[torch.Tensor], *, is_breakable: bool) -> None:
        """Note every operation from now on."""
        self._rows, self._inputs = rows, tuple(inputs)
        self._parts, self._is_breakable = [], is_breakable
        self._begin_part()

    def break_(
        self, call: Break, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        """Run `call` here at every replay."""
        if self._notes is None:
            call(0)
            return
        if not self._is_breakable:
            raise CaptureError("this capture takes the whole forward pass and may not break")
        self.abandon()
        call(0)
        self._parts.append(call)
        self._begin_part()

    def weak(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor: all that a recording makes stays."""
        return tensor

    def end(self, outputs: Sequence[torch.Tensor]) -> RecordedGraph:
        """The recorded graph."""
        self.abandon()
        return RecordedGraph(self._rows, self._parts, self._inputs, tuple(outputs), self._streams)

    def abandon(self) -> None:
        """Note nothing any more."""
        if self._notes is not None:
            self._notes.close()
        self._notes = None

    def poison(self) -> None:
        """NaN in all floats that graphs compute."""
        for notes in self._all:
            notes.poison()

    def _begin_part(self) -> None:
        self._notes = Notes(self._library)
        self._all.append(self._notes)
        self._parts.append(self._notes)
        self._notes.open()
