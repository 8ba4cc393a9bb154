"""A stand-in for torch.cuda on a machine without a card: its graphs are recordings, its streams are
clocks, and every call is noted.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from polypath.runtime.graphs.recording import Notes
from polypath.runtime.graphs.streams import Event, Stream, Streams


class FakeCuda:
    """What `CudaGraph` asks of torch.cuda."""

    def __init__(self) -> None:
        self.streams = Streams()
        self.log: list[str] = []
        self.notes: list[Notes] = []  # of every captured graph
        self.num_pools = 0
        self.capturing: FakeGraph | None = None

    def CUDAGraph(self) -> FakeGraph:
        return FakeGraph(self)

    def graph_pool_handle(self) -> tuple[int, int]:
        self.num_pools += 1
        return (0, self.num_pools)

    def Stream(self) -> Stream:
        return self.streams.new_stream()

    def Event(self) -> Event:
        return self.streams.new_event()

    def current_stream(self) -> Stream:
        return self.streams.current

    def stream(self, stream: Stream) -> AbstractContextManager[None]:
        return self.streams.on(stream)

    def synchronize(self) -> None:
        assert self.capturing is None, "waiting within a capture ends it"
        self.log.append("synchronize")

    def empty_cache(self) -> None:
        self.log.append("empty_cache")

    def mem_get_info(self) -> tuple[int, int]:
        return 1000 - self.memory_reserved() - 5 * len(self.notes), 1000

    def memory_reserved(self) -> int:
        return 10 * len(self.notes)


class FakeGraph:
    """A `torch.cuda.CUDAGraph`: refuses what that refuses."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._notes = Notes()
        self._stream: Stream | None = None
        self.is_broken = False

    def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
        cuda = self._cuda
        assert cuda.capturing is None, "one capture at a time"
        assert cuda.current_stream() is not cuda.streams.default, "not on the default stream"
        cuda.capturing = self
        cuda.log.append(f"begin pool {pool[1]} stream {cuda.current_stream().number}")
        assert capture_error_mode == "thread_local"
        self._stream = cuda.current_stream()
        self._notes.open()

    def capture_end(self) -> None:
        cuda = self._cuda
        assert cuda.capturing is self and cuda.current_stream() is self._stream
        self._notes.close()
        cuda.capturing = None
        cuda.log.append("end")
        if self.is_broken:
            raise RuntimeError("operation failed due to a previous error during capture")
        cuda.notes.append(self._notes)

    def replay(self) -> None:
        assert self._cuda.capturing is None, "no replay within a capture"
        self._cuda.log.append("replay")
        self._notes.run()
