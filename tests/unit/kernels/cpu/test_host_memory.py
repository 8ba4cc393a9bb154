"""Memory for weights: zeroed, aligned, apart from each other, and taken only when touched."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from polypath.kernels.cpu.host_memory import ALIGNMENT, LARGE_PAGE, REGION, HostMemory, large_zeros
from polypath.runtime.allocator import give_back, large_blocks_apart


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_blocks_are_zero_aligned_and_apart() -> None:
    memory = HostMemory()
    blocks = [
        memory.zeros(n) for n in (0, 1, 100, REGION // 2 + 1, REGION, REGION // 2, REGION // 2)
    ]
    for number, block in enumerate(blocks):
        assert block.data_ptr() % ALIGNMENT == 0 or not block.numel()
        assert not block.any()
        block.fill_(number + 1)
    for number, block in enumerate(blocks):
        assert bool((block == number + 1).all())


def test_large_blocks_begin_at_a_large_page_and_take_nothing_before_they_are_touched() -> None:
    before = resident_bytes()
    block = large_zeros(64 * LARGE_PAGE)
    assert block.data_ptr() % LARGE_PAGE == 0
    assert resident_bytes() - before < 4 * LARGE_PAGE
    block[::4096] = 1
    assert resident_bytes() - before > 60 * LARGE_PAGE


def test_blocks_of_a_small_pool_are_not_made_of_memory_that_was_had_back() -> None:
    """A pool of 64 MB for 30 layers: freed copies of weights stayed in the heap, became keys and
    values that nobody had written, and their place was taken a second time.
    """
    with large_blocks_apart():
        pass  # as after loading: the C library keeps what it gets back
    freed = [torch.ones(LARGE_PAGE) for _ in range(6)]
    del freed
    blocks = [large_zeros(LARGE_PAGE + 4096 * i) for i in range(6)]
    give_back()
    before = resident_bytes()
    for block in blocks:
        block.fill_(1)
    assert resident_bytes() - before > 5 * LARGE_PAGE, "untouched pages took memory"


def test_memory_goes_back_when_the_last_block_is_gone() -> None:
    block = large_zeros(64 * LARGE_PAGE)
    block.fill_(1)
    full, view = resident_bytes(), block[:10].view(torch.int8)
    del block
    gc.collect()
    assert resident_bytes() > full - 4 * LARGE_PAGE, "a view holds all of it"
    del view
    gc.collect()
    assert resident_bytes() < full - 60 * LARGE_PAGE
