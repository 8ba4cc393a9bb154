"""A whole model over the Triton table and backend gives the logits of a plain forward: prefill,
mixed and decode steps, and a graph's static batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from polypath.runtime.attention.triton import TritonBackend
from polypath.runtime.build_context import BuildContext
from polypath.runtime.checkpoint.source import open_checkpoint
from polypath.runtime.forward_batch import BatchTensors, ForwardBatch
from polypath.runtime.forward_mode import ForwardMode
from polypath.runtime.kv.pool import KVPool
from polypath.runtime.linear import dense
from polypath.runtime.models.decoder import Decoder
from polypath.runtime.ops.triton import TritonOps
from polypath.runtime.runners.static_batch import StaticBatch
from polypath.runtime.self_check import plain_forward
from polypath.runtime.weights import WeightLoader
from polypath.tests import tiny_models

PAGE_SIZE = 16
CPU = torch.device("cpu")
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 12,
}


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens start .. stop - 1 of a sequence, whose keys lie in `pages`."""

    ids: list[int]
    start: int
    stop: int
    pages: list[int]


def batch_of(mode: ForwardMode, parts: Sequence[Part]) -> ForwardBatch:
    """All logits wanted."""
    slots, starts = [], [0]
    for part in parts:
        for at in range(part.start, part.stop):
            slots.append(part.pages[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE)
        starts.append(len(slots))
    width = max(len(part.pages) for part in parts)
    table = [part.pages + [0] * (width - len(part.pages)) for part in parts]
    return ForwardBatch(
        mode=mode,
        query_starts=tuple(starts),
        kv_lens=tuple(part.stop for part in parts),
        num_logits=len(slots),
        page_size=PAGE_SIZE,
        device=CPU,
        made=BatchTensors(
            input_ids=torch.tensor([i for part in parts for i in part.ids[part.start : part.stop]]),
            positions=torch.tensor([at for part in parts for at in range(part.start, part.stop)]),
            slots=torch.tensor(slots),
            page_table=torch.tensor(table, dtype=torch.int32),
            logits_rows=torch.arange(len(slots)),
        ),
    )


@pytest.fixture(scope="module", params=["mistral", pytest.param("llama", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = tmp_path_factory.mktemp(request.param)
    tiny_models.random(folder, config=MISTRAL if request.param == "mistral" else None)
    checkpoint = open_checkpoint(str(folder))
    context = BuildContext(model=checkpoint.config, dtype=torch.float32, device=CPU)
    loader = WeightLoader(checkpoint, dense.build(context), dtype=torch.float32, device=CPU)
    return Decoder(checkpoint.config, loader.load(), TritonOps())


def pool_of(model: Decoder) -> KVPool:
    return KVPool(model.config, num_pages=6, page_size=PAGE_SIZE, dtype=torch.float32, device=CPU)


LONG = [(7 * i) % 256 + 4 for i in range(22)]
SHORT = [(5 * i) % 256 + 4 for i in range(9)]


def check(found: torch.Tensor, *wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, torch.cat(wanted), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_prefill_mixed_and_decode_steps_equal_a_plain_forward(model: Decoder) -> None:
    kv, backend = pool_of(model), TritonBackend(model.config)
    long, short = plain_forward(model, LONG), plain_forward(model, SHORT)
    steps = [
        (ForwardMode.PREFILL, (0, 18), (0, 0)),
        (ForwardMode.MIXED, (18, 19), (0, 7)),
        (ForwardMode.DECODE, (19, 20), (7, 8)),
    ]
    for mode, (a, b), (c, d) in steps:
        parts = [Part(LONG, a, b, [3, 1]), Part(SHORT, c, d, [4])]
        batch = batch_of(mode, [part for part in parts if part.stop > part.start])
        backend.plan(batch)
        check(model.forward(batch, kv, backend).values, long[a:b], short[c:d])


@torch.inference_mode()
def test_a_static_batch_of_padding_and_two_rows_equals_a_plain_forward(model: Decoder) -> None:
    kv, backend = pool_of(model), TritonBackend(model.config)
    wanted = plain_forward(model, LONG), plain_forward(model, SHORT)
    parts = [Part(LONG, 0, 21, [3, 1]), Part(SHORT, 0, 8, [4])]
    batch = batch_of(ForwardMode.PREFILL, parts)
    backend.plan(batch)
    model.forward(batch, kv, backend)
    static = StaticBatch(tokens=4, rows=4, max_pages=3, page_size=PAGE_SIZE, device=CPU)
    captured = backend.prepare_capture(static.batch(ForwardMode.DECODE))
    parts = [Part(LONG, 21, 22, [3, 1]), Part(SHORT, 8, 9, [4])]
    for live in (parts, parts[1:]):  # the second leaves a row behind, which must become padding
        step = batch_of(ForwardMode.DECODE, live)
        static.fill(step)
        captured.refresh(step)
        captured.use()
        logits = model.forward(static.batch(ForwardMode.DECODE), kv, backend)
        found = logits.values
        assert logits.best is not None and torch.equal(logits.best, found.argmax(dim=-1))
        assert found.isfinite().all()
        check(found[: len(live)], *(logits[-1:] for logits in wanted[2 - len(live) :]))
