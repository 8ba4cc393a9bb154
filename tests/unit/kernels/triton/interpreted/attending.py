"""Paged batches for tests of attention, and what is right for them in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from polypath.kernels.triton.paged import PagedRows, Scores

NAN = float("nan")
BOUNDS = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 3e-2}
"""The interpreter cuts bfloat16 off where a GPU rounds: twice the error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Of one test."""

    num_heads: int
    kv_heads: int
    head_dim: int
    page_size: int = 16
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Paged:
    """A batch whose keys lie in pages dealt out at random."""

    q_TND: torch.Tensor
    kv_P2SKD: torch.Tensor
    rows: PagedRows

    def truth(self, scores: Scores) -> torch.Tensor:
        """float64 [T, N, D], one query after another."""
        starts, lens = self.rows.query_starts.tolist(), self.rows.kv_lens.tolist()
        out = torch.zeros(self.q_TND.shape, dtype=torch.float64)
        for row, kv_len in enumerate(lens):
            keys, values = self._keys(row, kv_len)
            for token in range(starts[row], starts[row + 1]):
                stop = kv_len - (starts[row + 1] - token) + 1
                start = max(0, stop - scores.window) if scores.window else 0
                seen = keys[start:stop], values[start:stop]
                out[token] = _attend(self.q_TND[token].double(), *seen, scores)
        return out

    def _keys(self, row: int, kv_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        page_size = self.kv_P2SKD.shape[2]
        pages = self.rows.page_table[row, : -(-kv_len // page_size)].long()
        keys, values = self.kv_P2SKD[pages].double().transpose(0, 1)
        return keys.flatten(0, 1)[:kv_len], values.flatten(0, 1)[:kv_len]


def _attend(
    q_ND: torch.Tensor, keys_LKD: torch.Tensor, values_LKD: torch.Tensor, scores: Scores
) -> torch.Tensor:
    group = q_ND.shape[0] // keys_LKD.shape[1]
    keys, values = (t.repeat_interleave(group, dim=1) for t in (keys_LKD, values_LKD))
    products = torch.einsum("nd,lnd->nl", q_ND, keys) * scores.scale
    if scores.soft_cap:
        products = (products / scores.soft_cap).tanh() * scores.soft_cap
    return torch.einsum("nl,lnd->nd", products.softmax(dim=-1), values)


def paged(shape: Shape, new: Sequence[int], kv_lens: Sequence[int], seed: int = 0) -> Paged:
    """`new` tokens of each row at the end of its `kv_lens`. The pool holds NaN wherever no row has
    a token, pages of no row stand in the table beyond each row's own, and q is a strided view.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(shape.dtype)

    needed = [-(-length // shape.page_size) for length in kv_lens]
    num_pages = sum(needed) + 2
    order = torch.randperm(num_pages - 1, generator=generator).to(torch.int32) + 1
    dead = order[-1]
    table = torch.full((len(kv_lens), max(needed) + 1), int(dead), dtype=torch.int32)
    pool_shape = (num_pages, 2, shape.page_size, shape.kv_heads, shape.head_dim)
    pool = torch.full(pool_shape, NAN, dtype=shape.dtype)
    taken = 0
    for row, (pages, length) in enumerate(zip(needed, kv_lens, strict=True)):
        table[row, :pages] = order[taken : taken + pages]
        taken += pages
        for token in range(length):
            page = int(table[row, token // shape.page_size])
            pool[page, :, token % shape.page_size] = noise(2, shape.kv_heads, shape.head_dim)
    starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
    width = shape.num_heads * shape.head_dim
    q = noise(int(starts[-1]), width + 32)[:, 32:].unflatten(1, (shape.num_heads, shape.head_dim))
    lens = torch.tensor(kv_lens, dtype=torch.int32)
    return Paged(q, pool, PagedRows(table, starts, lens))


def check(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """`found` is within its type's bound of the float64 `wanted`."""
    bound = BOUNDS[found.dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=bound, atol=bound)
