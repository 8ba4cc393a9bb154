"""Norm, rotation and store in one kernel equal the torch table, which takes one after another."""

from __future__ import annotations

import pytest
import torch

from polypath.kernels.rotary import cos_sin, inverse_frequencies
from polypath.kernels.triton.rope_store import Norms, norm_rope_store
from polypath.runtime.ops.torch import TorchOps

BOUNDS = {torch.float32: 2e-6, torch.float16: 6e-3, torch.bfloat16: 5e-2}


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def compare(
    *,
    dtype: torch.dtype,
    num_heads: int,
    kv_heads: int,
    head_dim: int,
    has_norms: bool,
    page_size: int = 16,
    tokens: int = 3,
) -> None:
    """Both on the same input; the pool holds NaN wherever nothing is stored."""
    width = (num_heads + 2 * kv_heads) * head_dim
    qkv = noise(tokens, width + 16, dtype=dtype)[:, 16:]
    angles = cos_sin(torch.arange(tokens) * 37 + 900, inverse_frequencies(head_dim, 1e4))
    norms: Norms | None = None
    if has_norms:
        weights = [1 + noise(head_dim, dtype=dtype, seed=seed) / 5 for seed in (1, 2)]
        norms = weights[0], weights[1], 1e-6
    slots = torch.tensor([3 * page_size + 1, page_size - 1, 2 * page_size, 5, 6])[:tokens]
    shape = (4, 2, page_size, kv_heads, head_dim)
    pools = [torch.full(shape, float("nan"), dtype=dtype) for _ in range(2)]
    found = norm_rope_store(qkv, *angles, norms, pools[0], slots, num_heads)
    qkv = qkv.contiguous()
    wanted = TorchOps().qkv_norm_rope_store(qkv, angles, norms, pools[1], slots, num_heads)
    bound = BOUNDS[dtype]
    torch.testing.assert_close(found, wanted, rtol=bound, atol=bound)
    torch.testing.assert_close(pools[0], pools[1], rtol=bound, atol=bound, equal_nan=True)


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("has_norms", [False, True])
def test_it_equals_the_torch_table(has_norms: bool, dtype: torch.dtype) -> None:
    compare(dtype=dtype, num_heads=6, kv_heads=2, head_dim=64, has_norms=has_norms)


def test_heads_of_no_power_of_two_are_not_overrun() -> None:
    compare(dtype=torch.float32, num_heads=9, kv_heads=3, head_dim=80, has_norms=True, page_size=5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (16, 1), (14, 2), (3, 3)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_it_equals_the_torch_table_for_many_shapes(
    head_dim: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    num_heads, kv_heads = heads
    shape = {"num_heads": num_heads, "kv_heads": kv_heads, "head_dim": head_dim}
    compare(dtype=dtype, has_norms=True, page_size=32, tokens=2, **shape)
    compare(dtype=dtype, has_norms=False, page_size=1 + num_heads, tokens=5, **shape)
