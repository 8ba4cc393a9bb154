"""Graphs on a GPU: torch.cuda.CUDAGraph over one memory pool and one stream.

Whole forward passes are one graph; a breakable capture is a list of graphs with Python between
them. Tensors of a capture live in the pool only as long as Python holds them, so what outlives it
(outputs, and what a break reads and writes) is kept by address alone: replays run in the order of
the capture, and a smaller graph may use the memory of a larger one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from ..collector import paused
from .forbidden import no_waiting
from .guard import GpuGuard
from .mechanism import Break, CaptureError, Forward, ReplayError

CAPTURE_ERROR_MODE = "thread_local"
"""Other threads of the process may use the device during a capture (copies, telemetry)."""


class CudaCapturedGraph:
    """See `CapturedGraph`."""

    def __init__(
        self,
        rows: int,
        parts: Sequence[_Part],
        inputs: Sequence[torch.Tensor],
        outputs: tuple[torch.Tensor, ...],
        num_bytes: int,
    ) -> None:
        self.rows = rows
        self.outputs = outputs
        self.num_bytes = num_bytes
        self._parts = tuple(parts)
        self._inputs = tuple(inputs)  # a graph holds addresses alone
        self._addresses = tuple(t.data_ptr() for t in inputs)

    def replay(self, rows: int, inputs: Sequence[torch.Tensor]) -> None:
        """Launch it on the current stream; ReplayError for too many rows, or inputs elsewhere."""
        if rows > self.rows:
            raise ReplayError(f"{rows} rows were given to a graph of {self.rows}")
        if tuple(t.data_ptr() for t in inputs) != self._addresses:
            raise ReplayError("an input has moved since the graph was captured")
        for part in self._parts:
            part.graph.replay()
            if part.then is not None:
                part.then(rows)

    @property
    def num_breaks(self) -> int:
        """How often Python runs in a replay."""
        return sum(part.then is not None for part in self._parts)


@dataclass(frozen=True, slots=True)
class _Part:
    """One graph, then a break."""

    graph: torch.cuda.CUDAGraph
    then: Break | None


class CudaGraph:
    """See `GraphMechanism`. `cuda` is torch.cuda, or what a test puts in its place."""

    name = "cuda_graph"
    pads = True
    reads_memory = False

    def __init__(self, cuda: Any = torch.cuda) -> None:  # Any: a module, or an object like it
        self._cuda = cuda
        self._pool: Any = None  # torch's own handles and streams, made at the first use
        self._stream: Any = None
        self._pool_bytes = 0
        self._graph: Any = None  # that is being captured
        self._open = ExitStack()
        self._watch = ExitStack()  # of one part
        self._parts: list[_Part] = []

    def warm_up(self, forward: Forward, *, is_breakable: bool) -> None:
        """Run it once on the capture's stream: libraries make their handles and workspaces for it,
        and kernels are compiled, none of which a capture allows.
        """
        stream = self._own_stream()
        stream.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(stream):
            forward()
        self._cuda.current_stream().wait_stream(stream)
        self._cuda.synchronize()

    def begin(self, rows: int, inputs: Sequence[torch.Tensor], *, is_breakable: bool) -> None:
        """Capture from now on, on the one stream and into the one pool."""
        assert self._graph is None, "one capture at a time"
        self._rows, self._inputs, self._is_breakable = rows, tuple(inputs), is_breakable
        self._parts = []
        self._cuda.synchronize()
        self._cuda.empty_cache()  # what is cached elsewhere cannot become part of the pool
        self._free_before = self._cuda.mem_get_info()[0]
        self._reserved_before = self._cuda.memory_reserved()
        self._own_stream().wait_stream(self._cuda.current_stream())
        try:
            # Garbage may be graphs and events of the device, whose end a capture does not allow.
            self._open.enter_context(paused())
            self._open.enter_context(self._cuda.stream(self._own_stream()))
            self._begin_part()
        except BaseException:
            self.abandon()
            raise

    def break_(
        self, call: Break, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        """End the graph here and begin the next; see `GraphMechanism`."""
        if self._graph is None:
            call(0)
            return
        if not self._is_breakable:
            raise CaptureError("this capture takes the whole forward pass and may not break")
        self._end_part(call)
        self._begin_part()

    def weak(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, not held."""
        return without_owner(tensor) if self._graph is not None else tensor

    def end(self, outputs: Sequence[torch.Tensor]) -> CudaCapturedGraph:
        """The captured graph."""
        kept = tuple(without_owner(tensor) for tensor in outputs)
        self._end_part(None)
        parts = self._parts
        self.abandon()
        self._cuda.current_stream().wait_stream(self._stream)
        reserved = max(0, self._cuda.memory_reserved() - self._reserved_before)
        taken = max(0, self._free_before - self._cuda.mem_get_info()[0])
        self._pool_bytes += reserved
        return CudaCapturedGraph(self._rows, parts, self._inputs, kept, max(0, taken - reserved))

    def abandon(self) -> None:
        """Leave the capture. After one that failed later graphs get a pool and a stream of their
        own: torch may still count the old ones as capturing.
        """
        if self._graph is not None:
            try:
                self._end_part(None)
            except RuntimeError:  # the driver has ended a capture that broke its rules
                self._graph = None
            self._pool = self._stream = None
        self._open.close()
        self._parts = []

    def poison(self) -> None:
        """NaN in all memory of the pool."""
        for segment in self._cuda.memory_snapshot():
            if tuple(segment["segment_pool_id"]) == tuple(self._pool or ()):
                _bytes_at(segment["address"], segment["total_size"]).fill_(0xFF)

    @property
    def num_bytes(self) -> int:
        """Bytes that captures have added to the pool."""
        return self._pool_bytes

    def _own_stream(self) -> Any:
        if self._stream is None:
            self._stream = self._cuda.Stream()
        return self._stream

    def _begin_part(self) -> None:
        if self._pool is None:
            self._pool = self._cuda.graph_pool_handle()
        self._graph = self._cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode=CAPTURE_ERROR_MODE)
        self._watch.enter_context(no_waiting())
        self._watch.enter_context(GpuGuard())

    def _end_part(self, then: Break | None) -> None:
        self._watch.close()
        graph = self._graph
        graph.capture_end()
        self._graph = None
        self._parts.append(_Part(graph, then))


class _Memory:
    """Bytes of the device, as torch reads foreign memory."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _bytes_at(address: int, num_bytes: int) -> torch.Tensor:
    return torch.as_tensor(_Memory(address, num_bytes), device="cuda")


def without_owner(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, kept alive by whoever has it; a tensor on a CPU as it is."""
    if tensor.device.type != "cuda":
        return tensor
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    flat = _bytes_at(tensor.data_ptr(), (last + 1) * tensor.element_size())
    return flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
