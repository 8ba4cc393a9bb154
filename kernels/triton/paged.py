"""What decode and prefill attention share: where a request's keys lie, and one step of a softmax
that sees its scores tile by tile (Milakov and Gimelshein 2018; Dao et al. 2022).

Raw scores are q . k, or tanh of it under a soft cap; `sharpness` makes them exponents of two. The
difference is taken before the product, so that no fused multiply-add rounds one path differently.
Shapes: T tokens, B rows (requests), N query heads, K key/value heads, D head dim, P pages, S page
size, W pages of the widest row.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2

import torch
import triton.language as tl

from .dialect import dot, jit, power_of_two, tanh


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Which queries and keys belong together: read by kernels when they run, all int32."""

    page_table: torch.Tensor  # [B, W]; elements of a row lie side by side
    query_starts: torch.Tensor  # [B + 1], offsets into T
    kv_lens: torch.Tensor  # [B], with the new tokens; 0 for a row without any

    @property
    def num_rows(self) -> int:
        """Requests."""
        return self.kv_lens.shape[0]


@dataclass(frozen=True, slots=True)
class PagedHeads:
    """Sizes that a kernel is compiled for."""

    num_heads: int
    kv_heads: int
    head_dim: int
    page_size: int

    @classmethod
    def of(cls, q_TND: torch.Tensor, kv_P2SKD: torch.Tensor) -> PagedHeads:
        """Those of queries and of the pool that they look into."""
        _, _, page_size, kv_heads, head_dim = kv_P2SKD.shape
        return cls(q_TND.shape[1], kv_heads, head_dim, page_size)

    @property
    def group_size(self) -> int:
        """Query heads that share a key."""
        return self.num_heads // self.kv_heads

    @property
    def padded_dim(self) -> int:
        """Elements of a head in registers."""
        return power_of_two(self.head_dim)

    def constants(self) -> tuple[int, int, int, int, int]:
        """In the order in which kernels take them: N, K, D, D padded, S."""
        return self.num_heads, self.kv_heads, self.head_dim, self.padded_dim, self.page_size


@dataclass(frozen=True, slots=True)
class Scores:
    """How a product of query and key becomes a score, and which keys a query sees."""

    scale: float
    window: int | None = None  # keys that a query sees, itself among them
    soft_cap: float | None = None

    @property
    def inner(self) -> float:
        """What a product is multiplied with before the tanh of a soft cap."""
        return self.scale / self.soft_cap if self.soft_cap else 1.0

    @property
    def sharpness(self) -> float:
        """What a raw score is multiplied with to be an exponent of two."""
        return (self.soft_cap or self.scale) * log2(e)


def check_layout(q_TND: torch.Tensor, kv_P2SKD: torch.Tensor, rows: PagedRows) -> None:
    """Assert what the kernels' addresses rely on."""
    num_heads, head_dim = q_TND.shape[1:]
    assert q_TND.stride()[1:] == (head_dim, 1), "the heads of a token lie side by side"
    assert kv_P2SKD.is_contiguous() and kv_P2SKD.shape[4] == head_dim, "pages are whole"
    assert num_heads % kv_P2SKD.shape[3] == 0, "query heads share key/value heads evenly"
    assert rows.page_table.stride(1) == 1, "the pages of a row lie side by side"
    kinds = {t.dtype for t in (rows.page_table, rows.query_starts, rows.kv_lens)}
    assert kinds == {torch.int32}, "lengths and pages are int32"


@jit
def key_rows(pages_ptr, first, tokens, inside, page_size: tl.constexpr, tile: tl.constexpr):
    """Rows of keys, of the pool seen as [P * 2 * S, K, D]; values lie S rows further. `first` is
    the tile's first token, a multiple of the tile: one that fits into a page is all in one page.
    """
    if page_size % tile == 0:
        page = tl.load(pages_ptr + first // page_size)
    else:
        page = tl.load(pages_ptr + tokens // page_size, mask=inside, other=0)
    return page.to(tl.int64) * (2 * page_size) + tokens % page_size


@jit
def raw_scores(q, k, inner, has_cap: tl.constexpr, height: tl.constexpr, tile: tl.constexpr):
    """float32 [height, tile]."""
    products = dot(q, tl.trans(k), tl.zeros([height, tile], dtype=tl.float32))
    if has_cap:
        products = tanh(products * inner)
    return products


@jit
def soften(raw, v, best, total, acc, sharpness):
    """One more tile: the largest score so far, the sum of weights, and the weighted values. A row
    that sees nothing of the tile keeps what it had, bit for bit.
    """
    new_best = tl.maximum(best, tl.max(raw, axis=1))
    finite = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2((raw - finite[:, None]) * sharpness)
    kept = tl.exp2((best - finite) * sharpness)
    total = total * kept + tl.sum(weights, axis=1)
    acc = dot(weights.to(v.dtype), v, acc * kept[:, None])
    return new_best, total, acc
