"""Zeroed memory of the host for weights and keys, in large pages where the system gives them.

A decode step reads all weights once. In pages of 4 KiB that is tens of thousands of translations,
each of them a walk through two sets of tables on a virtual machine, and no hardware prefetcher
crosses a page.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from threading import Lock

import numpy as np
import torch

LARGE_PAGE = 2 << 20  # bytes, on x86-64 and on aarch64 with pages of 4 KiB
LEAST = 16 << 20  # bytes; smaller blocks would leave much of their large pages unused
OWN = 1 << 20  # bytes from which a block has pages of its own
REGION = LEAST  # small blocks of weights share regions of so many bytes
ALIGNMENT = 64  # bytes, a cache line


class HostMemory:
    """Hands out blocks side by side; a region goes back to the system when all its blocks are gone
    and the next one has been begun.
    """

    def __init__(self) -> None:
        self._region = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._lock = Lock()

    def zeros(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes], aligned to cache lines; untouched pages take no memory."""
        if num_bytes > REGION // 2:
            return large_zeros(num_bytes)
        with self._lock:
            if self._used + num_bytes > self._region.numel():
                self._region, self._used = large_zeros(REGION), 0
            block = self._region[self._used : self._used + num_bytes]
            self._used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
            return block


def large_zeros(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes], all 0, aligned to cache lines; from LEAST bytes on it has large pages of
    its own. Untouched pages take no memory: from OWN bytes on the system is asked, because the C
    library would hand out, and zero, what it has had back. Raises OSError or MemoryError where
    there is no room.
    """
    if num_bytes < OWN:
        return _aligned(torch.from_numpy(np.zeros(num_bytes + ALIGNMENT, np.uint8)), num_bytes)
    if num_bytes < LEAST:
        return torch.frombuffer(_mapped(num_bytes), dtype=torch.uint8)[:num_bytes]
    memory = _mapped(num_bytes + LARGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without large pages: small ones do, slower
            memory.madvise(mmap.MADV_HUGEPAGE)
    return _aligned(torch.frombuffer(memory, dtype=torch.uint8), num_bytes, LARGE_PAGE)


def _mapped(num_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _aligned(whole: torch.Tensor, num_bytes: int, alignment: int = ALIGNMENT) -> torch.Tensor:
    start = -whole.data_ptr() % alignment
    return whole[start : start + num_bytes]
