"""The C library's allocator while weights load.

glibc raises the size from which a block gets pages of its own to that of each such block that is
freed, up to 32 MiB. Weights would then lie between short-lived copies in one heap, which keeps the
gaps: a 582 MB model took 184 MB more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # numbers of mallopt(3)
APART = 1 << 20  # bytes; blocks of weights and copies of them are larger
USUAL = 32 << 20  # where glibc's own adjustment ends


@contextmanager
def large_blocks_apart() -> Iterator[None]:
    """Inside, blocks of 1 MiB and more get pages of their own, which go back when they are freed.

    Afterwards blocks of a step come from the heap again. Does nothing without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(MMAP_THRESHOLD, APART)
    try:
        yield
    finally:
        mallopt(MMAP_THRESHOLD, USUAL)
        mallopt(TRIM_THRESHOLD, 2 * USUAL)


def give_back() -> None:
    """Return what the heap holds free to the system. Does nothing without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
