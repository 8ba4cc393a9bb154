"""Memory for weights: zeroed, aligned, apart from each other, and taken only when touched."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from polypath.kernels.cpu.host_memory import ALIGNMENT, LARGE_PAGE, REGION, HostMemory, large_zeros


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
