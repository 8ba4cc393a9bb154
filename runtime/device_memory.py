"""What a device's memory says of itself: free, held by tensors, and the most that was held."""

from __future__ import annotations

import gc
from typing import Any, Protocol

import torch


class DeviceMemory(Protocol):
    """Counts the bytes of one device. Its tests have numbers of their own."""

    def free_bytes(self) -> int:
        """Free on the device, once torch has given back what it only keeps."""
        ...

    def held_bytes(self) -> int:
        """In tensors now."""
        ...

    def watch(self) -> None:
        """Let `watched_bytes` begin again."""
        ...

    def watched_bytes(self) -> int:
        """The most that was in tensors at once since `watch`."""
        ...

    def peak_bytes(self) -> int:
        """The same since the process began."""
        ...


class CudaMemory:
    """A card's, as driver and torch's allocator count it. `cuda` is torch.cuda, or what a test puts
    in its place.
    """

    def __init__(self, cuda: Any = torch.cuda) -> None:  # Any: a module, or an object like it
        self._cuda = cuda
        self._before = 0  # the peak until the last `watch`

    def free_bytes(self) -> int:
        """See `DeviceMemory`."""
        gc.collect()  # graphs and backends that are no longer used hold some
        self._cuda.synchronize()
        self._cuda.empty_cache()
        return self._cuda.mem_get_info()[0]

    def held_bytes(self) -> int:
        """See `DeviceMemory`."""
        return self._cuda.memory_allocated()

    def watch(self) -> None:
        """See `DeviceMemory`."""
        self._before = self.peak_bytes()
        self._cuda.reset_peak_memory_stats()

    def watched_bytes(self) -> int:
        """See `DeviceMemory`."""
        return self._cuda.max_memory_allocated()

    def peak_bytes(self) -> int:
        """See `DeviceMemory`."""
        return max(self._before, self._cuda.max_memory_allocated())


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Of a card; None on a CPU, where tensors share the process's memory with all else."""
    return CudaMemory() if device.type == "cuda" else None
