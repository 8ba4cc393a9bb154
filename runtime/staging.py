"""Host numbers on their way to a device: through pinned memory, copied in stream order, and never
overwritten before they have arrived.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch


class Fence:
    """Keeps the host from writing a buffer that a device still copies from."""

    def __init__(self, cuda: Any) -> None:  # Any: torch.cuda, its stand-in, or None on a CPU
        self._event = cuda.Event() if cuda is not None else None
        self._is_marked = False

    def wait(self) -> None:
        """Until all work before the last `mark` is done; before the host writes."""
        if self._event is not None and self._is_marked:
            self._event.synchronize()

    def mark(self) -> None:
        """Work up to here reads what the host wrote."""
        if self._event is not None:
            self._event.record()
            self._is_marked = True


class Staging:
    """A few pinned buffers of int32, used in turn, so that waiting for one is rare."""

    def __init__(
        self, device: torch.device, capacity: int, *, cuda: Any = None, depth: int = 4
    ) -> None:
        if cuda is None and device.type == "cuda":
            cuda = torch.cuda
        pinned = device.type == "cuda"
        self._buffers = [
            (torch.empty(capacity, dtype=torch.int32, pin_memory=pinned), Fence(cuda))
            for _ in range(depth)
        ]
        self._next = 0

    def copy(self, values: Sequence[int], out: torch.Tensor) -> None:
        """Into the first elements of an int32 tensor, on the current stream."""
        buffer, fence = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        count = len(values)
        assert 0 < count <= buffer.numel(), "a buffer holds what one step needs at most"
        fence.wait()
        buffer[:count] = torch.frombuffer(array("i", values), dtype=torch.int32)
        out[:count].copy_(buffer[:count], non_blocking=True)
        fence.mark()
