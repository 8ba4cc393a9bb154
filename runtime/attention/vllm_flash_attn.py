"""Attention by FlashAttention 2 or 3, from whichever package has it (flash_packages.py): prefill,
decode and mixed batches are one call.

Graphs of FA3 need its schedule at a fixed address, refreshed before each replay, and a bound on how
often a row's keys are split, since that sizes what the kernel allocates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch

from ..build_context import BuildContext
from ..config import ModelConfig
from ..errors import EngineError
from ..forward_batch import ForwardBatch
from ..planning.capability import Capability, Carrier
from ..staging import Staging
from .flash_packages import FlashCall, FlashPackage, Heads, Wanted, find_package

CAPABILITY = Capability(
    name="vllm_flash_attn",
    kind="attention",
    source="runtime/attention/vllm_flash_attn.py",
    devices=("cuda",),
    dtypes=("bfloat16", "float16"),
    page_sizes=(16, 32, 64, 128, 256),
    head_dims=tuple(range(8, 257, 8)),
    min_compute_capability=(8, 0),
    sliding_window=True,
    graph_support="uniform",
    carriers=(
        Carrier(package="vllm", page_multiple=16),
        Carrier(package="flash_attn_library", compute_capability=9),
        Carrier(package="flash_attn_interface", compute_capability=9),
        Carrier(package="flash_attn>=2.8", page_multiple=256),
        Carrier(package="vllm_flash_attn", page_multiple=16, torch="2.4.0"),
    ),
)

MOST_SPLITS = 32
"""In a graph, how many parts the keys of one row may be split into; vLLM's bound."""


class VllmFlashAttnBackend:
    """Everything that a step varies lies in int32 tensors that are allocated once."""

    name = "vllm_flash_attn"

    def __init__(
        self,
        model: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        package: FlashPackage,
        *,
        cuda: Any = None,  # torch.cuda's stand-in in tests
    ) -> None:
        self.package = package
        self.cuda = cuda
        self.device = device
        self.heads = Heads(
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=dtype,
        )
        self._windows = [_window(w) for w in model.layer_windows or (None,) * model.num_layers]
        self.windows = tuple(dict.fromkeys(self._windows))
        self._lengths: Lengths | None = None
        self._call: FlashCall | None = None
        self._metadata: dict[tuple[int, int], torch.Tensor | None] = {}

    def plan(self, batch: ForwardBatch) -> None:
        """Lengths of this step, on their way to the device."""
        if self._lengths is None or self._lengths.rows < batch.num_rows:
            self._lengths = Lengths(self.device, batch.num_rows, self.cuda)
        self._lengths.write(batch.query_starts, batch.kv_lens)
        widest = max(b - a for a, b in pairwise(batch.query_starts))
        self._call = self._lengths.call(batch, self.heads.head_dim**-0.5, widest)
        self._metadata = {}

    def attend(self, q_TND: torch.Tensor, kv_layer: torch.Tensor, layer: int) -> torch.Tensor:
        """Attention of the planned batch. Returns [T, N, D]."""
        assert self._call is not None, "a batch is planned before it is attended"
        window = self._windows[layer]
        keys, values = kv_layer[:, 0], kv_layer[:, 1]
        metadata = self._metadata.get(window)
        return self.package.attend(q_TND, keys, values, self._call, window, metadata)

    def prepare_capture(self, batch: ForwardBatch) -> VllmFlashAttnCaptured:
        """Lengths and schedules of their own for the graphs of one size."""
        return VllmFlashAttnCaptured(self, batch)

    def read_from(
        self, call: FlashCall, metadata: dict[tuple[int, int], torch.Tensor | None]
    ) -> None:
        """Let `attend` read these tensors."""
        self._call, self._metadata = call, metadata


class Lengths:
    """Query starts, key lengths and their sums of at most `rows` requests, on the device."""

    def __init__(self, device: torch.device, rows: int, cuda: Any) -> None:
        self.rows = rows
        self._query_starts = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self._kv_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._kv_starts = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self._staging = Staging(device, rows + 1, cuda=cuda)

    def write(self, query_starts: Sequence[int], kv_lens: Sequence[int]) -> None:
        """Of one batch, in stream order."""
        self._staging.copy(query_starts, self._query_starts)
        self.write_keys(kv_lens)

    def write_keys(self, kv_lens: Sequence[int]) -> None:
        """Of one batch whose query starts are there already."""
        self._staging.copy(kv_lens, self._kv_lens)
        self._staging.copy((0, *accumulate(kv_lens)), self._kv_starts)

    def call(self, batch: ForwardBatch, scale: float, max_queries: int) -> FlashCall:
        """The call for a batch that is written."""
        rows = batch.num_rows
        return FlashCall(
            query_starts=self._query_starts[: rows + 1],
            kv_lens=self._kv_lens[:rows],
            kv_starts=self._kv_starts[: rows + 1],
            page_table=batch.page_table,
            max_queries=max_queries,
            max_kv=max(batch.kv_lens),
            page_size=batch.page_size,
            scale=scale,
        )

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What a graph holds the addresses of."""
        return self._query_starts, self._kv_lens, self._kv_starts


class VllmFlashAttnCaptured:
    """Lengths and schedules at fixed addresses; padding sees one token of the scratch page."""

    def __init__(self, backend: VllmFlashAttnBackend, batch: ForwardBatch) -> None:
        rows, width = batch.page_table.shape
        self._backend = backend
        self._lengths = Lengths(batch.page_table.device, rows, backend.cuda)
        self._lengths.write(batch.query_starts, batch.kv_lens)
        call = self._lengths.call(batch, backend.heads.head_dim**-0.5, 1)
        self._call = replace(call, max_kv=width * batch.page_size, num_splits=MOST_SPLITS)
        if backend.package.version != 3:
            self._call = replace(self._call, num_splits=0)
        size = 1 + -(-rows // 4) * 4 * 4
        self._metadata: dict[tuple[int, int], torch.Tensor | None] = {}
        for window in backend.windows:
            first = backend.package.metadata(backend.heads, self._call, window)
            self._metadata[window] = (
                None if first is None else torch.zeros(size, dtype=torch.int32, device=first.device)
            )
        self._schedule()

    def refresh(self, batch: ForwardBatch) -> None:
        """This step's lengths, and FA3's schedule of them."""
        assert batch.num_tokens == batch.num_rows, "graphs of whole steps are for decode batches"
        padding = (1,) * (self._lengths.rows - batch.num_rows)
        self._lengths.write_keys((*batch.kv_lens, *padding))
        self._schedule()

    def use(self) -> None:
        """Let the backend read from here."""
        self._backend.read_from(self._call, self._metadata)

    def inputs(self) -> Sequence[torch.Tensor]:
        """Static tensors."""
        schedules = (tensor for tensor in self._metadata.values() if tensor is not None)
        return *self._lengths.tensors(), *schedules

    def _schedule(self) -> None:
        for window, static in self._metadata.items():
            if static is None:
                continue
            found = self._backend.package.metadata(self._backend.heads, self._call, window)
            assert found is not None and found.numel() <= static.numel(), "sized for all rows"
            static[: found.numel()] = found
            static[found.numel() :] = 0


def _window(window: int | None) -> tuple[int, int]:
    """Keys before and after the query's own that it sees."""
    return (-1, -1) if window is None else (window - 1, 0)


def build(context: BuildContext) -> VllmFlashAttnBackend:
    """The backend over the first package that can be used; EngineError where none can."""
    wanted = Wanted(
        compute_capability=torch.cuda.get_device_capability(context.device),
        page_size=context.page_size,
        extension=context.flash_attn_library,
    )
    package, refused = find_package(wanted)
    passed_over = f" (passed over: {'; '.join(refused)})" if refused else ""
    if package is None:
        raise EngineError(f"no package with FlashAttention can be used{passed_over}")
    context.notes.append(
        f"vllm_flash_attn: FlashAttention {package.version} of {package.name}{passed_over}"
    )
    return VllmFlashAttnBackend(context.model, context.dtype, context.device, package)
