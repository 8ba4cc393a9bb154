"""Graphs on a CPU: each native kernel call notes itself, and one native call runs all of them.

Capturing computes nothing. `warm_up` follows the forward pass once to learn which calls touch which
tensor; the capture then gets its tensors from an arena laid out by those lifetimes, which all
graphs share. Row counts are read at replay, so that only live rows are computed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch

from ...kernels.cpu.host_memory import large_zeros
from ...kernels.cpu.library import ROWS_ARGUMENT, Library, argument_types
from ...kernels.cpu.program import Program
from .arena import Span, lay_out
from .guard import CaptureGuard
from .mechanism import Break, CaptureError, Forward, ReplayError


@dataclass(frozen=True, slots=True)
class _Part:
    """Calls first .. last - 1 of the program, then a break."""

    first: int
    last: int
    then: Break | None


class CpuCapturedGraph:
    """See `CapturedGraph`."""

    def __init__(
        self,
        rows: int,
        program: Program,
        parts: Sequence[_Part],
        inputs: Sequence[torch.Tensor],
        outputs: tuple[torch.Tensor, ...],
        held: Sequence[torch.Tensor],
    ) -> None:
        self.rows = rows
        self.outputs = outputs
        self._program = program
        self._parts = tuple(parts)
        self._inputs = tuple(inputs)
        self._addresses = tuple(t.data_ptr() for t in inputs)
        self._held = tuple(held)  # whatever the calls point to stays alive with the graph

    def replay(self, rows: int, inputs: Sequence[torch.Tensor]) -> None:
        """Run it over the first `rows` rows. ReplayError for too many, or for inputs elsewhere."""
        if rows > self.rows:
            raise ReplayError(f"{rows} rows were given to a graph of {self.rows}")
        if not all(map(is_, inputs, self._inputs)) and (
            tuple(t.data_ptr() for t in inputs) != self._addresses
        ):
            raise ReplayError("an input has moved since the graph was captured")
        for part in self._parts:
            self._program.run(part.first, part.last, rows)
            if part.then is not None:
                part.then(rows)

    @property
    def num_bytes(self) -> int:
        """Bytes of the noted calls."""
        return self._program.num_bytes

    @property
    def num_breaks(self) -> int:
        """How often Python runs in a replay."""
        return sum(part.then is not None for part in self._parts)


class CpuGraph:
    """See `GraphMechanism`."""

    name = "cpu_graph"
    pads = False
    reads_memory = True

    def __init__(self, library: Library) -> None:
        self._library = library
        self._pool = torch.empty(0, dtype=torch.uint8)
        self._num_graphs = 0  # that live in the pool
        self._offsets: list[int] = []
        self._sizes: list[int] = []
        self._tape: _Tape | None = None
        self._open = ExitStack()

    def warm_up(self, forward: Forward, *, is_breakable: bool) -> None:
        """Follow the forward pass and lay its tensors out; CaptureError where it cannot be
        captured, or needs more than the pool that earlier graphs live in.
        """
        tape = _Tape(self._library, None, is_breakable=is_breakable)
        self._tape = tape
        try:
            with tape.watching():
                outputs = forward()
            tape.finish(outputs)
        finally:
            self._tape = None
        self._offsets, num_bytes = lay_out(tape.spans)
        self._sizes = [span.num_bytes for span in tape.spans]
        if num_bytes <= self._pool.numel():
            return
        if self._num_graphs:
            raise CaptureError(
                f"this graph needs {num_bytes} bytes, more than the {self._pool.numel()} of the "
                "larger ones captured before it"
            )
        self._pool = large_zeros(num_bytes)

    def begin(self, rows: int, inputs: Sequence[torch.Tensor], *, is_breakable: bool) -> None:
        """Capture from now on."""
        assert self._tape is None, "one capture at a time"
        self._rows, self._inputs = rows, tuple(inputs)
        self._tape = _Tape(self._library, rows, is_breakable=is_breakable, place=self._place)
        self._open.enter_context(self._tape.watching())

    def break_(
        self, call: Break, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        """Stop the graph here; see `GraphMechanism`."""
        assert self._tape is not None, "a break belongs to a capture"
        self._tape.stop(call, (*reads, *writes))

    def weak(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor: the arena shares bytes by lifetimes, not by who holds a tensor."""
        return tensor

    def end(self, outputs: Sequence[torch.Tensor]) -> CpuCapturedGraph:
        """The captured graph."""
        tape = self._tape
        assert tape is not None, "begin comes before end"
        self.abandon()
        tape.finish(outputs)
        self._num_graphs += 1
        held = (*tape.held, *self._inputs, self._pool)
        return CpuCapturedGraph(
            self._rows, tape.program, tape.parts, self._inputs, tuple(outputs), held
        )

    def abandon(self) -> None:
        """Stop capturing."""
        self._open.close()
        self._tape = None

    def poison(self) -> None:
        """Fill the pool with NaN."""
        self._pool.fill_(0xFF)

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool."""
        return self._pool.numel()

    def _place(self, index: int, num_bytes: int) -> torch.Tensor:
        """The pool's bytes for the capture's tensor of that number."""
        if index >= len(self._sizes) or self._sizes[index] != num_bytes:
            raise CaptureError("the forward pass asked for other tensors than when it was followed")
        return self._pool[self._offsets[index] : self._offsets[index] + num_bytes]


class _Tape:
    """Everything that happens in one pass over a forward: its tensors, calls and breaks."""

    def __init__(
        self,
        library: Library,
        rows: int | None,
        *,
        is_breakable: bool,
        place: Callable[[int, int], torch.Tensor] | None = None,
    ) -> None:
        self.program = Program(library)
        self.parts: list[_Part] = []
        self.spans: list[Span] = []
        self.held: list[torch.Tensor] = []
        self._library = library
        self._rows = rows  # None while the pass is only followed
        self._is_breakable = is_breakable
        self._place = place or (lambda index, num_bytes: large_zeros(num_bytes))
        self._own: dict[int, int] = {}  # storage -> the last tensor of the capture made in it
        self._storage_at: dict[int, int] = {}  # address that a kernel may be given -> storage
        self._time = 0
        self._started = 0

    def watching(self) -> ExitStack:
        """The context of a pass."""
        stack = ExitStack()
        stack.enter_context(self._library.recording(self._note))
        stack.enter_context(
            CaptureGuard(empty=self._empty, addressed=self._addressed, other=self._other)
        )
        return stack

    def stop(self, call: Break, tensors: Iterable[torch.Tensor]) -> None:
        """A break: the graph so far is one part."""
        if not self._is_breakable:
            raise CaptureError("this capture takes the whole forward pass and may not break")
        for tensor in tensors:
            self._touch(tensor.untyped_storage().data_ptr())
            self.held.append(tensor)
        self.parts.append(_Part(self._started, len(self.program), call))
        self._started = len(self.program)
        self._time += 1

    def finish(self, outputs: Iterable[torch.Tensor]) -> None:
        """The last part; outputs live on to the end."""
        self.parts.append(_Part(self._started, len(self.program), None))
        for output in outputs:
            self._touch(output.untyped_storage().data_ptr())

    def _note(self, name: str, arguments: tuple[Any, ...]) -> None:
        rows = arguments[ROWS_ARGUMENT[name]]
        if self._rows is not None and rows != self._rows:
            raise CaptureError(f"{name} runs over {rows} rows in a graph of {self._rows}")
        for position, (value, kind) in enumerate(zip(arguments, argument_types(name), strict=True)):
            if kind is not ctypes.c_void_p or not value:
                continue
            if value not in self._storage_at:
                raise CaptureError(
                    f"argument {position} of {name} is an address that no tensor gave during the "
                    "capture: what lies there could be freed before a replay"
                )
            self._touch(self._storage_at[value])
        self.program.add(name, arguments)
        self._time += 1

    def _touch(self, storage: int) -> None:
        if storage in self._own:
            span = self.spans[self._own[storage]]
            span.first, span.last = min(span.first, self._time), self._time

    def _addressed(self, tensor: torch.Tensor) -> None:
        self._storage_at[tensor.data_ptr()] = tensor.untyped_storage().data_ptr()
        self.held.append(tensor)

    def _empty(self, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        num_bytes = size.numel() * dtype.itemsize
        memory = self._place(len(self.spans), num_bytes)
        self._own[memory.untyped_storage().data_ptr()] = len(self.spans)
        self.spans.append(Span(num_bytes, _NEVER, -1))
        self.held.append(memory)  # so that no later tensor of this pass gets the same address
        return memory.view(dtype).view(size)

    def _other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation that is no kernel of ours: an error, or a break that runs it."""
        if not self._is_breakable:
            raise CaptureError(
                f"{func} cannot be captured: only views, `empty` and native kernels can; "
                "run it outside the graph, or capture piecewise"
            )
        given = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            self.stop(lambda rows: func(*args, **kwargs), given)
            return result
        if not isinstance(result, torch.Tensor):
            raise CaptureError(f"{func} returns no tensor, so a replay could not run it again")
        own = self._empty(result.shape, result.dtype)
        self.stop(lambda rows: own.copy_(func(*args, **kwargs)), [*given, own])
        return own


_NEVER = 1 << 60
