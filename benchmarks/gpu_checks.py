"""What must hold of kernels on a card before any figure of it counts: they equal float64 over the
shapes of models, and a row's bits do not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from polypath.runtime.attention import registry as attention_registry
from polypath.runtime.attention.backend import AttentionBackend
from polypath.runtime.attention.torch_sdpa import TorchSdpaBackend
from polypath.runtime.build_context import BuildContext
from polypath.runtime.errors import EngineError
from polypath.runtime.forward_batch import ForwardBatch
from polypath.runtime.kv.pool import KVPool
from polypath.runtime.linear.dense import DenseLinear
from polypath.runtime.ops.ops import Ops
from polypath.runtime.ops.torch import TorchOps
from polypath.runtime.planning.candidate import find
from polypath.runtime.request import Request
from polypath.runtime.scheduler import RequestState, ScheduledRow

BOUNDS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of one kernel against float64, relative to the largest value."""

PAGE = 16
LENGTHS = ((1, 1), (1, 700), (33, 40), (1, 17), (5, 300), (1, 255))  # (new tokens, all tokens)
HEAD_LENGTHS = ((1, 1), (1, 300), (37, 37), (1, 17), (5, 150))
DECODES = ((1, 1), (1, 700), (1, 17), (1, 1025), (1, 255), (1, 4096))
AMONG = (2, 32, 256)  # rows of a batch that one row is put into


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention of one kind of model, and the number type it is looked at in."""

    shape: tuple[int, int, int]  # query heads, key/value heads, their size
    dtype: torch.dtype
    window: int | None = None
    soft_cap: float | None = None
    page_size: int = PAGE

    def __str__(self) -> str:
        heads, kv_heads, size = self.shape
        also = "" if self.window is None else f", window {self.window}"
        also += "" if self.soft_cap is None else f", cap {self.soft_cap:g}"
        return f"{heads}/{kv_heads} x {size}{also}, pages {self.page_size} {str(self.dtype)[6:]}"


HEADS = (
    Heads((32, 8, 128), torch.bfloat16),
    Heads((16, 8, 128), torch.float16, page_size=64),
    Heads((14, 2, 64), torch.bfloat16),
    Heads((8, 8, 64), torch.float32),
    Heads((32, 32, 80), torch.float16),
    Heads((24, 8, 96), torch.bfloat16, page_size=128),
    Heads((16, 1, 256), torch.float16),
    Heads((8, 4, 256), torch.bfloat16, window=64, soft_cap=50.0),
    Heads((5, 1, 128), torch.float32, window=33),
    Heads((32, 8, 128), torch.float16, window=300, page_size=64),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that was looked at; `value` is an error where there is a number."""

    name: str
    passed: bool
    note: str = ""
    value: float | None = None


def tables(context: BuildContext) -> list[Ops]:
    """The ops tables of our kernels that this device runs."""
    if context.device.type != "cuda":
        return [TorchOps()]
    from polypath.runtime.ops.triton import TritonOps

    return [TritonOps()]


def dtypes_of(device: torch.device) -> tuple[torch.dtype, ...]:
    """Those that are looked at; cards before 8.0 have no bfloat16."""
    if device.type == "cpu":
        return (torch.float32,)
    has_bfloat16 = torch.cuda.get_device_capability(device) >= (8, 0)
    return tuple(dtype for dtype in BOUNDS if dtype != torch.bfloat16 or has_bfloat16)


def check_ops(context: BuildContext) -> Iterator[Check]:
    """Each operation of each table against torch in float64, on the same values."""
    for table in tables(context):
        for dtype in dtypes_of(context.device):
            for name, ours, exact in _op_pairs(table, dtype, context.device):
                error = _error(ours, exact)
                label = f"{table.name}.{name} {str(dtype)[6:]}"
                yield Check(name=label, passed=error <= BOUNDS[dtype], value=error)


def _op_pairs(
    ops: Ops, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator(device).manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    twin, wide = TorchOps(), torch.float64
    x, residual, weight = random(37, 512), random(37, 512), random(512)
    yield "norm", ops.norm(x, weight, 1e-5), twin.norm(x.to(wide), weight.to(wide), 1e-5)
    ours = ops.add_norm(x.clone(), residual.clone(), weight, 1e-5)
    exact = twin.add_norm(x.to(wide), residual.to(wide), weight.to(wide), 1e-5)
    yield "add_norm", ours[0], exact[0]
    yield "add_norm sum", ours[1], exact[1]
    gate_up = random(37, 2 * 768)
    yield "silu_mul", ops.silu_mul(gate_up), twin.silu_mul(gate_up.to(wide))
    positions = torch.arange(37, device=device) * 31
    inverse = 10_000.0 ** -(torch.arange(0, 64, 2, device=device) / 64)
    cos, sin = twin.rope(positions, inverse.float())
    qkv, norm = random(37, 8 * 64), random(64)
    pool = torch.zeros(8, 2, PAGE, 2, 64, dtype=dtype, device=device)
    slots = torch.arange(37, device=device) + PAGE
    for norms in (None, (norm, norm, 1e-5)):
        kv, wide_kv = pool.clone(), pool.to(wide)
        q = ops.qkv_norm_rope_store(qkv, (cos, sin), norms, kv, slots, 4)
        wide_norms = None if norms is None else (norm.to(wide), norm.to(wide), 1e-5)
        turn = (cos.to(wide), sin.to(wide))
        exact_q = twin.qkv_norm_rope_store(qkv.to(wide), turn, wide_norms, wide_kv, slots, 4)
        kind = "" if norms is None else " with norms"
        yield f"qkv_norm_rope_store{kind}", q, exact_q
        yield f"stored keys and values{kind}", kv, wide_kv
    found = ops.logits(DenseLinear(random(1000, 64), None), random(5, 64))
    if found.best is not None:
        is_largest = found.values == found.values.amax(dim=-1, keepdim=True)
        places = torch.arange(1000, device=device).where(is_largest, 1000)
        yield "argmax", found.best, places.amin(dim=-1)  # torch's may take any of equals


def _error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    if not exact.is_floating_point():
        return 0.0 if torch.equal(ours, exact) else torch.inf
    difference = (ours.double() - exact.double()).abs().max()
    return float(difference.nan_to_num(nan=torch.inf) / exact.double().abs().max().clamp_min(1e-30))


def backends(context: BuildContext) -> Iterator[tuple[str, AttentionBackend | str]]:
    """Each attention backend of this device, or why it is not there."""
    for candidate in attention_registry.CANDIDATES:
        capability = candidate.capability
        if context.device.type not in capability.devices or not capability.built:
            continue
        if capability.native_kernels:
            continue
        try:
            yield capability.name, candidate.load().build(context)
        except (ImportError, OSError, RuntimeError, EngineError) as error:
            yield capability.name, str(error).partition("\n")[0]


def batch_of(
    lengths: tuple[tuple[int, int], ...], device: torch.device
) -> tuple[ForwardBatch, int]:
    """A batch of rows (new tokens, all tokens) over pages dealt backwards; and how many pages."""
    rows, page = [], sum(-(-total // PAGE) for _, total in lengths)
    num_pages = page + 1
    for i, (new, total) in enumerate(lengths):
        state = RequestState(Request(id=str(i), prompt_ids=(5,) * total), i, total + 1)
        for _ in range(-(-total // PAGE)):
            state.pages.append(page)
            page -= 1
        state.num_computed = total - new
        rows.append(ScheduledRow(state, new))
    return ForwardBatch.build(rows, page_size=PAGE, device=device), num_pages


def check_attention(context: BuildContext) -> Iterator[Check]:
    """Each backend against torch_sdpa in float64, on mixed batches."""
    for dtype in dtypes_of(context.device):
        here = replace(context, dtype=dtype)
        for name, backend in backends(here):
            label = f"{name} {str(dtype)[6:]}"
            if isinstance(backend, str):
                yield Check(name=label, passed=True, note=f"not here: {backend}")
                continue
            try:
                error = _attention_error(backend, here)
            except (RuntimeError, ValueError, AssertionError) as refused:
                is_ours = name in ("triton", "torch_sdpa")
                text = str(refused).partition("\n")[0]
                yield Check(name=label, passed=not is_ours, note=f"refused: {text}")
                continue
            yield Check(name=label, passed=error <= BOUNDS[dtype], value=error)


def _attention_error(backend: AttentionBackend, context: BuildContext) -> float:
    batch, num_pages = batch_of(LENGTHS, context.device)
    q, kv = _random_attention(context, batch.num_tokens, num_pages)
    exact = TorchSdpaBackend(context.model, torch.float64)
    exact.plan(batch)
    expected = exact.attend(q.double(), kv.double(), 0)
    backend.plan(batch)
    return _error(backend.attend(q, kv, 0), expected)


def _random_attention(
    context: BuildContext, num_tokens: int, num_pages: int
) -> tuple[torch.Tensor, torch.Tensor]:
    model, device = context.model, context.device
    pool = KVPool(
        replace(model, num_layers=1),
        num_pages=num_pages,
        page_size=PAGE,
        dtype=context.dtype,
        device=device,
    )
    generator = torch.Generator(device).manual_seed(2)
    pool.layers[0].copy_(torch.randn(pool.layers[0].shape, generator=generator, device=device))
    shape = (num_tokens, model.num_heads, model.head_dim)
    q = torch.randn(shape, generator=generator, device=device).to(context.dtype)
    return q, pool.layers[0]


def check_heads(device: torch.device, kinds: Sequence[Heads] = HEADS) -> Iterator[Check]:
    """Our attention kernels against float64, over the heads of models; whatever lies around a
    row's keys is NaN. On a CPU nothing unless Triton interprets.
    """
    from polypath.kernels.triton.decode_attention import decode_attention
    from polypath.kernels.triton.paged import PagedRows, Scores
    from polypath.kernels.triton.prefill_attention import prefill_attention
    from polypath.tests.unit.kernels.triton.interpreted.attending import Shape, paged

    for kind in kinds:
        if device.type == "cuda" and kind.dtype not in dtypes_of(device):
            continue
        heads, kv_heads, size = kind.shape
        shape = Shape(
            num_heads=heads,
            kv_heads=kv_heads,
            head_dim=size,
            page_size=kind.page_size,
            dtype=kind.dtype,
        )
        batch = paged(shape, [new for new, _ in HEAD_LENGTHS], [all_ for _, all_ in HEAD_LENGTHS])
        scores = Scores(size**-0.5, kind.window, kind.soft_cap)
        rows = batch.rows
        moved = (t.to(device) for t in (rows.page_table, rows.query_starts, rows.kv_lens))
        here, q, kv = PagedRows(*moved), batch.q_TND.to(device), batch.kv_P2SKD.to(device)
        out = torch.full(q.shape, torch.nan, dtype=kind.dtype, device=device)
        decode_attention(q, kv, here, scores, out)
        prefill_attention(q, kv, here, scores, out)
        error = _error(out.cpu(), batch.truth(scores))
        yield Check(name=str(kind), passed=error <= BOUNDS[kind.dtype], value=error)


def check_invariance(context: BuildContext) -> Iterator[Check]:
    """Rows alone and among others: equal bits, where attention and operations claim it."""
    for name, backend in backends(context):
        if isinstance(backend, str) or not _claims_invariance(name):
            continue
        for kind, lengths in (("decode", DECODES), ("mixed", LENGTHS)):
            wrong = _rows_that_change(backend, context, lengths)
            note = f"rows {wrong} change" if wrong else f"{len(lengths)} rows"
            yield Check(name=f"{name} {kind}", passed=not wrong, note=note)
        for count in AMONG:
            lengths = tuple(DECODES[i % 5] for i in range(count))
            wrong = _rows_that_change(backend, context, lengths, of=(0, 1, count - 1))
            note = f"rows {wrong} change" if wrong else ""
            yield Check(name=f"{name} decode among {count}", passed=not wrong, note=note)
    for table in tables(context):
        wrong = _ops_that_change(table, context)
        note = f"{', '.join(wrong)} change" if wrong else f"among {AMONG} rows"
        yield Check(name=f"ops {table.name}", passed=not wrong, note=note)


def _claims_invariance(backend: str) -> bool:
    return find(attention_registry.CANDIDATES, backend).capability.batch_invariant


def _rows_that_change(
    backend: AttentionBackend,
    context: BuildContext,
    lengths: tuple[tuple[int, int], ...],
    of: Sequence[int] | None = None,
) -> list[int]:
    """Of the rows `of`, all by default, those whose bits differ when they stand alone."""
    batch, num_pages = batch_of(lengths, context.device)
    q, kv = _random_attention(context, batch.num_tokens, num_pages)
    backend.plan(batch)
    together = backend.attend(q, kv, 0).clone()
    wrong = []
    for i in range(len(lengths)) if of is None else of:
        new, total = lengths[i]
        first, last = batch.query_starts[i], batch.query_starts[i + 1]
        alone = replace(
            batch,
            query_starts=(0, new),
            kv_lens=(total,),
            numbers=None,
            made=replace(batch.tensors, page_table=batch.page_table[i : i + 1].contiguous()),
        )
        backend.plan(alone)
        if not torch.equal(backend.attend(q[first:last].contiguous(), kv, 0), together[first:last]):
            wrong.append(i)
    return wrong


def _ops_that_change(table: Ops, context: BuildContext) -> list[str]:
    """Operations whose first row has other bits alone than among others."""
    device, model = context.device, context.model
    generator = torch.Generator(device).manual_seed(3)
    sizes = (max(AMONG), model.hidden_size), (max(AMONG), 2 * model.intermediate_size)
    x, gate_up = (
        torch.randn(size, generator=generator, device=device).to(context.dtype) for size in sizes
    )
    weight = torch.ones(model.hidden_size, dtype=context.dtype, device=device)
    runs: dict[str, Callable[[int], torch.Tensor]] = {
        "norm": lambda rows: table.norm(x[:rows], weight, 1e-5),
        "add_norm": lambda rows: table.add_norm(x[:rows], x[:rows], weight, 1e-5)[0],
        "silu_mul": lambda rows: table.silu_mul(gate_up[:rows]),
    }
    return [
        name
        for name, run in runs.items()
        if any(not torch.equal(run(1)[0], run(rows)[0]) for rows in AMONG)
    ]
