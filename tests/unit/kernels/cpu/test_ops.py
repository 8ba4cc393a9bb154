"""Native norms, rotary with KV store, gate, argmax and paged attention, each against its plain
torch twin.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polypath.kernels import paged_attention, rms_norm, rotary, silu_mul, store_kv
from polypath.kernels.cpu import ops
from polypath.kernels.cpu.library import Library

SAME = settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
EPS = 1e-5


def near(found: torch.Tensor, expected: torch.Tensor, bound: float = 2e-5) -> bool:
    return bool(torch.allclose(found, expected, rtol=bound, atol=bound, equal_nan=True))


@SAME
@given(rows=st.integers(0, 40), width=st.integers(1, 300), seed=st.integers(0, 2**31))
def test_norms(library: Library, rows: int, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, residual = torch.randn(2, rows, width, generator=generator)
    weight = torch.randn(width, generator=generator)
    assert near(ops.rms_norm(library, x, weight, EPS), rms_norm.rms_norm(x, weight, EPS))
    found = ops.add_rms_norm(library, x, residual, weight, EPS)
    expected = rms_norm.add_rms_norm(x, residual, weight, EPS)
    assert near(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@SAME
@given(rows=st.integers(0, 20), width=st.integers(1, 300), scale=st.sampled_from([0.1, 5.0, 200.0]))
def test_gate(library: Library, rows: int, width: int, scale: float) -> None:
    x = torch.randn(rows, 2 * width) * scale
    assert near(ops.silu_mul(library, x), silu_mul.silu_mul(x))


def test_gate_keeps_nan_and_infinity(library: Library) -> None:
    x = torch.tensor([[float("nan"), float("inf"), float("-inf"), 1.0, 1.0, 1.0, 1.0, 1.0]])
    found = ops.silu_mul(library, x)
    assert found[0, 0].isnan() and found[0, 1].isinf()
    assert near(found[:, 3:], silu_mul.silu_mul(x)[:, 3:])


def test_argmax_is_the_first_of_equals_and_prefers_nan(library: Library) -> None:
    x = torch.tensor([[1.0, 3.0, 3.0], [5.0, 5.0, 1.0], [0.0, float("nan"), 9.0]])
    assert ops.argmax(library, x).tolist() == x.argmax(-1).tolist()


@pytest.mark.parametrize("width", [1, 7, 31, 32, 33, 8191, 8192, 8193, 49152])
def test_argmax_of_wide_rows_in_pieces(library: Library, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x = torch.randint(-3, 4, (40, width), generator=generator).float()  # many equals
    x[10] = float("-inf")
    x[11] = float("-inf")
    x[11, -1] = -5.0
    for row in range(20, 40):  # one far above the others, or no number, anywhere
        at = int(torch.randint(0, width, (1,), generator=generator))
        x[row, at] = float("nan") if row % 4 == 0 else float("inf") if row % 4 == 1 else 100.0
    assert ops.argmax(library, x).tolist() == x.numpy().argmax(axis=1).tolist()


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 80), (8, 1, 128)])
@pytest.mark.parametrize("has_norms", [False, True])
def test_rope_store(
    library: Library,
    heads: int,
    kv_heads: int,
    dim: int,
    has_norms: bool,
    kv_dtype: torch.dtype,
) -> None:
    tokens, page_size = 11, 8
    pool = torch.randn(6, 2, page_size, kv_heads, dim).to(kv_dtype)
    expected_pool = pool.clone()
    slots = torch.randperm(5 * page_size)[:tokens] + page_size
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
    rope = rotary.cos_sin(torch.arange(tokens) + 100, rotary.inverse_frequencies(dim, 1e4))
    norms = (torch.randn(dim), torch.randn(dim), 1e-6) if has_norms else None
    q, k, v = qkv.view(tokens, -1, dim).split((heads, kv_heads, kv_heads), dim=1)
    if norms is not None:
        q = rms_norm.rms_norm(q, norms[0], norms[2])
        k = rms_norm.rms_norm(k, norms[1], norms[2])
    store_kv.store_kv(expected_pool, slots, rotary.rotate(k, *rope), v)
    found = ops.rope_store(library, qkv, rope, norms, pool, slots, heads)
    assert near(found, rotary.rotate(q, *rope))
    bound = 2e-5 if kv_dtype == torch.float32 else 1e-2
    assert near(pool.float(), expected_pool.float(), bound)


@SAME
@given(
    heads=st.sampled_from([(9, 3), (4, 4), (8, 1), (16, 2)]),
    dim=st.sampled_from([16, 32, 64, 80, 96, 128, 256]),
    page_size=st.sampled_from([1, 4, 16, 64]),
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 700)), min_size=1, max_size=5),
    window=st.sampled_from([None, 1, 16, 300]),
    is_bfloat=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_attention(
    library: Library,
    heads: tuple[int, int],
    dim: int,
    page_size: int,
    rows: list[tuple[int, int]],
    window: int | None,
    is_bfloat: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_heads, kv_heads = heads
    widths = [width for width, _ in rows]
    lens = [width + before for width, before in rows]
    counts = [-(-n // page_size) for n in lens]
    pages = (torch.randperm(sum(counts), generator=generator) + 1).to(torch.int32)
    table = torch.zeros(len(rows), max(counts), dtype=torch.int32)
    for i, part in enumerate(pages.split(counts)):
        table[i, : len(part)] = part
    shape = (sum(counts) + 1, 2, page_size, kv_heads, dim)
    pool = torch.randn(shape, generator=generator)
    pool = pool.bfloat16() if is_bfloat else pool
    starts = torch.tensor([0, *torch.tensor(widths).cumsum(0).tolist()], dtype=torch.int32)
    q = torch.randn(sum(widths), num_heads, dim, generator=generator)
    found = ops.attention(
        library, q, pool, table, starts, torch.tensor(lens, dtype=torch.int32), window, dim**-0.5
    )
    for i, (width, length) in enumerate(zip(widths, lens, strict=True)):
        slots = (table[i].long()[:, None] * page_size + torch.arange(page_size)).flatten()
        mask = paged_attention.causal_mask(length - width, width, length, window, torch.float32)
        at = slice(int(starts[i]), int(starts[i + 1]))
        expected = paged_attention.prefill_attention(
            q[at],
            pool.float(),
            store_kv.kv_rows(slots[:length], page_size),
            mask,
            dim**-0.5,
        )
        assert near(found[at], expected, 1e-4)


def test_attention_of_a_row_does_not_depend_on_its_neighbours(library: Library) -> None:
    pool = torch.randn(40, 2, 16, 3, 64)
    table = (torch.randperm(39)[:36] + 1).to(torch.int32).view(3, 12)
    lens = torch.tensor([190, 5, 64], dtype=torch.int32)
    q = torch.randn(3, 9, 64)
    starts = torch.arange(4, dtype=torch.int32)
    whole = ops.attention(library, q, pool, table, starts, lens, None, 0.125)
    for i in range(3):
        at = slice(i, i + 1)
        alone = ops.attention(library, q[at], pool, table[at], starts[:2], lens[at], None, 0.125)
        assert torch.equal(alone[0], whole[i])


@SAME
@given(
    heads=st.sampled_from([(9, 3), (4, 4), (7, 1)]),
    dim=st.sampled_from([20, 64, 128]),
    length=st.integers(2, 600),
    width=st.integers(2, 70),
    window=st.sampled_from([None, 1, 16, 300]),
    is_bfloat=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_attention_of_a_token_does_not_depend_on_how_its_prompt_was_cut(
    library: Library,
    heads: tuple[int, int],
    dim: int,
    length: int,
    width: int,
    window: int | None,
    is_bfloat: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    width = min(width, length)
    pages = -(-length // 16)
    pool = torch.randn(pages + 1, 2, 16, heads[1], dim, generator=generator)
    pool = pool.bfloat16() if is_bfloat else pool
    table = (torch.randperm(pages, generator=generator) + 1).to(torch.int32).view(1, -1)
    q = torch.randn(width, heads[0], dim, generator=generator)

    def attend(first: int, last: int) -> torch.Tensor:
        starts = torch.tensor([0, last - first], dtype=torch.int32)
        end = torch.tensor([length - width + last], dtype=torch.int32)
        return ops.attention(library, q[first:last], pool, table, starts, end, window, dim**-0.5)

    whole = attend(0, width)
    for cut in {1, width // 2, width - 1}:
        assert torch.equal(attend(0, cut), whole[:cut])
        assert torch.equal(attend(cut, width), whole[cut:])
    for i in range(width):  # as decode does
        assert torch.equal(attend(i, i + 1), whole[i : i + 1])


@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("first", [0, 260])
def test_attention_shows_what_is_no_number(library: Library, width: int, first: int) -> None:
    pool = torch.randn(21, 2, 16, 1, 32)
    table = torch.arange(1, 21, dtype=torch.int32).view(1, -1)
    for token in range(first, first + 32):  # all keys of one tile
        pool[1 + token // 16, 0, token % 16] = torch.nan
    starts = torch.tensor([0, width], dtype=torch.int32)
    lens = torch.tensor([310], dtype=torch.int32)
    found = ops.attention(library, torch.randn(width, 1, 32), pool, table, starts, lens, None, 1.0)
    assert found.isnan().all()


@pytest.mark.parametrize("rows", [0, 1, 17, 40])
def test_angles(library: Library, rows: int) -> None:
    positions = torch.randint(0, 8192, (rows,))
    inverse = rotary.inverse_frequencies(64, 10_000.0)
    for found, expected in zip(
        ops.cos_sin(library, positions, inverse), rotary.cos_sin(positions, inverse), strict=True
    ):
        assert near(found, expected, 1e-6)


@pytest.mark.parametrize("count", [0, 1, 33])
def test_rows_are_gathered_as_they_are(library: Library, count: int) -> None:
    x, index = torch.randn(20, 7), torch.randint(0, 20, (count,))
    assert torch.equal(ops.gather_rows(library, x, index), x[index])


@pytest.mark.parametrize("rows", [0, 1, 33])
def test_columns_are_put_side_by_side(library: Library, rows: int) -> None:
    parts = [torch.randn(rows, width) for width in (3, 8, 1)]
    assert torch.equal(ops.concat_columns(library, parts), torch.cat(parts, dim=1))
