"""A mechanism for tests: behaves as a GPU's graphs do, on any device and any operations.

A capture computes nothing that counts: a replay runs every noted operation again on the tensors
noted then, padded rows included. It notices inputs that have moved; `poison` overwrites all that
the graph computes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from ...kernels.cpu.library import Library, argument_types
from .guard import CaptureGuard
from .mechanism import Break, CaptureError, Forward, ReplayError


class RecordedGraph:
    """See `CapturedGraph`."""

    num_bytes = 0

    def __init__(
        self,
        rows: int,
        calls: Sequence[Break],
        inputs: Sequence[torch.Tensor],
        outputs: tuple[torch.Tensor, ...],
    ) -> None:
        self.rows = rows
        self.outputs = outputs
        self._calls = tuple(calls)
        self._addresses = tuple(t.data_ptr() for t in inputs)

    def replay(self, rows: int, inputs: Sequence[torch.Tensor]) -> None:
        """Run all calls over all rows of the graph."""
        if rows > self.rows:
            raise ReplayError(f"{rows} rows were given to a graph of {self.rows}")
        if tuple(t.data_ptr() for t in inputs) != self._addresses:
            raise ReplayError("an input has moved since the graph was captured")
        for call in self._calls:
            call(rows)


class Recording:
    """See `GraphMechanism`."""

    name = "recording"
    pads = True
    num_bytes = 0

    def __init__(self, library: Library | None = None) -> None:
        self._library = library
        self._calls: list[Break] = []
        self._made: list[torch.Tensor] = []  # everything that graphs compute
        self._held: list[torch.Tensor] = []  # and everything that their calls point to
        self._addresses: set[int] = set()
        self._is_breakable = False
        self._is_warming = False
        self._open = ExitStack()

    def warm_up(self, forward: Forward, *, is_breakable: bool) -> None:
        """Run it once; breaks are for captures."""
        self._is_warming = True
        try:
            forward()
        finally:
            self._is_warming = False

    def begin(self, rows: int, inputs: Sequence[torch.Tensor], *, is_breakable: bool) -> None:
        """Note every operation from now on."""
        self._rows, self._inputs = rows, tuple(inputs)
        self._calls, self._addresses, self._is_breakable = [], set(), is_breakable
        if self._library is not None:
            self._open.enter_context(self._library.recording(self._note))
        guard = CaptureGuard(empty=self._empty, addressed=self._addressed, other=self._other)
        self._open.enter_context(guard)

    def break_(
        self, call: Break, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        """Run `call` here at every replay."""
        if self._is_warming:
            return
        if not self._is_breakable:
            raise CaptureError("this capture takes the whole forward pass and may not break")
        self._calls.append(call)

    def end(self, outputs: Sequence[torch.Tensor]) -> RecordedGraph:
        """The recorded graph."""
        self.abandon()
        return RecordedGraph(self._rows, self._calls, self._inputs, tuple(outputs))

    def abandon(self) -> None:
        """Note nothing any more."""
        self._open.close()

    def poison(self) -> None:
        """NaN in all floats that graphs compute."""
        for tensor in self._made:
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))

    def _empty(self, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(size, dtype=dtype)
        self._made.append(tensor)
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
        self._calls.append(lambda rows: function(*arguments))

    def _other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            self._calls.append(lambda rows: func(*args, **kwargs))
            return result
        if not isinstance(result, torch.Tensor):
            raise CaptureError(f"{func} returns no tensor, so a replay could not run it again")
        self._made.append(result)
        self._calls.append(lambda rows: result.copy_(func(*args, **kwargs)))
        return result
