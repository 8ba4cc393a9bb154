"""Attention by FlashInfer: planned on the host from CPU tensors, one wrapper for each captured
size.

A wrapper is planned for one window, so a model that has layers with and without one gets a wrapper
for each. Decode batches run the decode kernels, or for four and more query heads a key/value head
the prefill kernels in their place, which use tensor cores; all other batches run the prefill
kernels. FlashInfer compiles a kernel at the first use unless it finds it compiled (docs/gpu.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from ...kernels.transfer import to_device
from ..build_context import BuildContext
from ..config import ModelConfig
from ..forward_batch import ForwardBatch
from ..planning.capability import Capability
from ..staging import Fence, Staging

CAPABILITY = Capability(
    name="flashinfer",
    kind="attention",
    source="runtime/attention/flashinfer.py",
    devices=("cuda",),
    dtypes=("bfloat16", "float16"),
    head_dims=(64, 128, 256),
    min_compute_capability=(7, 5),
    sliding_window=True,
    graph_support="single_token",
    packages=("flashinfer>=0.6.13",),
    needs_nvcc=True,
    workspace_bytes=128 << 20,  # for partial results of split keys; what FlashInfer recommends
    plan_bytes=8 << 20,  # of indices, in each of its wrappers (and as many on the host)
)

TENSOR_CORE_GROUP = 4
"""From so many query heads for each key/value head the tensor cores pay."""

DECODE_GROUPS = (1, 2, 3, 4, 6, 8)
"""Group sizes that the kernels without tensor cores are compiled for."""


@dataclass(frozen=True, slots=True)
class _Pages:
    """Keys of a batch as FlashInfer's page table, int32: of row i, pages indices[indptr[i] :
    indptr[i + 1]], the last of which holds last_page_len[i] tokens.
    """

    indptr: torch.Tensor  # [B + 1] on the host
    last_page_len: torch.Tensor  # [B] on the host
    indices: torch.Tensor  # on the device


class FlashInferBackend:
    """`package` is the module flashinfer, or what a test puts in its place."""

    name = "flashinfer"

    def __init__(
        self,
        model: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        package: Any,  # a module without types
        *,
        prefill_kernels: str = "auto",
        cuda: Any = None,  # torch.cuda on a card; None on a CPU
    ) -> None:
        self.model = model
        self.dtype = dtype
        self.device = device
        self.package = package
        self.cuda = cuda
        self.uses_tensor_cores = _tensor_cores(model.group_size)
        self.workspace = torch.zeros(CAPABILITY.workspace_bytes, dtype=torch.uint8, device=device)
        self._windows = model.layer_windows or (None,) * model.num_layers
        self.windows = tuple(sorted(set(self._windows), key=lambda w: w or 0))
        self._decode = {w: self._decode_wrapper() for w in self.windows}
        self._prefill = {
            w: package.BatchPrefillWithPagedKVCacheWrapper(
                self.workspace, "NHD", backend=prefill_kernels
            )
            for w in self.windows
        }
        self._fence = Fence(cuda)
        self._running: Mapping[int | None, Any] = self._decode  # by window

    def plan(self, batch: ForwardBatch) -> None:
        """Of this batch, for each window; waits until the last plan has reached the device."""
        pages = _pages(batch.page_table, batch.kv_lens, batch.page_size)
        self._fence.wait()
        if batch.num_tokens == batch.num_rows:
            self.plan_decode(self._decode, pages, batch.page_size)
            self._running = self._decode
        else:
            self._plan_prefill(pages, batch)
            self._running = self._prefill
        self._fence.mark()

    def attend(self, q_TND: torch.Tensor, kv_layer: torch.Tensor, layer: int) -> torch.Tensor:
        """Attention of the planned batch. Returns [T, N, D]."""
        return self._running[self._windows[layer]].run(q_TND, kv_layer)

    def prepare_capture(self, batch: ForwardBatch) -> FlashInferCaptured:
        """Wrappers of their own for the graphs of one size."""
        return FlashInferCaptured(self, batch)

    def run_on(self, wrappers: Mapping[int | None, Any]) -> None:
        """Let `attend` use these wrappers, which are planned."""
        self._running = wrappers

    def _decode_wrapper(self, **buffers: torch.Tensor) -> Any:  # FlashInfer's class
        return self.package.BatchDecodeWithPagedKVCacheWrapper(
            self.workspace,
            "NHD",
            use_cuda_graph=bool(buffers),
            use_tensor_cores=self.uses_tensor_cores,
            **buffers,
        )

    def captured_wrapper(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor
    ) -> Any:  # FlashInfer's class
        """A decode wrapper that reads its page table from these device tensors."""
        return self._decode_wrapper(
            paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=last_page_len,
        )

    def plan_decode(
        self, wrappers: Mapping[int | None, Any], pages: _Pages, page_size: int
    ) -> None:
        """Plan decode wrappers; those of a graph copy the page table to where they read it."""
        for window, wrapper in wrappers.items():
            wrapper.plan(
                pages.indptr,
                pages.indices,
                pages.last_page_len,
                *self._heads(page_size),
                **self._options(window),
            )

    def replan_decode(
        self, wrappers: Mapping[int | None, Any], pages: _Pages, page_size: int
    ) -> None:
        """Plan wrappers of a graph whose page table is already where they read it."""
        for window, wrapper in wrappers.items():
            self.package.decode.fast_decode_plan(
                wrapper,
                pages.indptr,
                pages.indices,
                pages.last_page_len,
                *self._heads(page_size),
                **self._options(window),
                global_override_indptr_cpu=pages.indptr,
            )

    def _plan_prefill(self, pages: _Pages, batch: ForwardBatch) -> None:
        for window, wrapper in self._prefill.items():
            wrapper.plan(
                torch.tensor(batch.query_starts, dtype=torch.int32),
                pages.indptr,
                pages.indices,
                pages.last_page_len,
                *self._heads(batch.page_size),
                causal=True,
                **self._options(window),
            )

    def _heads(self, page_size: int) -> tuple[int, int, int, int]:
        model = self.model
        return model.num_heads, model.num_kv_heads, model.head_dim, page_size

    def _options(self, window: int | None) -> dict[str, Any]:  # of several types
        return {
            "window_left": -1 if window is None else window - 1,  # keys before the query's own
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
            "sm_scale": self.model.head_dim**-0.5,
        }


class FlashInferCaptured:
    """The page table of one size's graphs at fixed addresses; padding sees one token of the scratch
    page.
    """

    def __init__(self, backend: FlashInferBackend, batch: ForwardBatch) -> None:
        rows, width = batch.page_table.shape
        self._backend = backend
        self._table = batch.page_table
        self._page_size = batch.page_size
        int32 = {"dtype": torch.int32, "device": batch.page_table.device}
        self._indptr = torch.zeros(rows + 1, **int32)
        self._indices = torch.zeros(rows * width, **int32)
        self._last_page_len = torch.zeros(rows, **int32)
        self._staging = Staging(batch.page_table.device, rows + 1, cuda=backend.cuda)
        self._fence = Fence(backend.cuda)
        self._wrappers = {
            window: backend.captured_wrapper(self._indptr, self._indices, self._last_page_len)
            for window in backend.windows
        }
        pages = _pages(self._table, batch.kv_lens, batch.page_size)
        backend.plan_decode(self._wrappers, pages, batch.page_size)
        self._fence.mark()

    def refresh(self, batch: ForwardBatch) -> None:
        """This step's page table, and a short plan of it."""
        assert batch.num_tokens == batch.num_rows, "graphs of whole steps are for decode batches"
        padding = (1,) * (self._table.shape[0] - batch.num_rows)
        pages = _pages(self._table, (*batch.kv_lens, *padding), self._page_size, self._indices)
        self._staging.copy(pages.indptr.tolist(), self._indptr)
        self._staging.copy(pages.last_page_len.tolist(), self._last_page_len)
        self._fence.wait()
        self._backend.replan_decode(self._wrappers, pages, self._page_size)
        self._fence.mark()

    def use(self) -> None:
        """Let the backend run these wrappers."""
        self._backend.run_on(self._wrappers)

    def inputs(self) -> Sequence[torch.Tensor]:
        """Static tensors."""
        return self._indptr, self._indices, self._last_page_len


def _pages(
    table: torch.Tensor,
    kv_lens: Sequence[int],
    page_size: int,
    out: torch.Tensor | None = None,
) -> _Pages:
    """The dense page table [B, W] of a device as FlashInfer's; `out` gets the indices."""
    counts = [-(-length // page_size) for length in kv_lens]
    indptr = (0, *accumulate(counts))
    last = [length - (count - 1) * page_size for length, count in zip(kv_lens, counts, strict=True)]
    flat = to_device(_flat(counts, indptr, table.shape[1]), table.device)
    indices = table.reshape(-1).index_select(0, flat)
    if out is not None:
        out[: indices.numel()] = indices
        indices = out[: indices.numel()]
    return _Pages(
        indptr=torch.tensor(indptr, dtype=torch.int32),
        last_page_len=torch.tensor(last, dtype=torch.int32),
        indices=indices,
    )


def _flat(counts: Sequence[int], indptr: Sequence[int], width: int) -> torch.Tensor:
    """Where each page stands in the dense table seen as one row; int64, on the host."""
    of_row = torch.tensor(counts)
    shift = torch.arange(len(counts)) * width - torch.tensor(indptr[:-1])
    return torch.arange(indptr[-1]) + shift.repeat_interleave(of_row)


def _tensor_cores(group_size: int) -> bool:
    return group_size >= TENSOR_CORE_GROUP or group_size not in DECODE_GROUPS


def _prefill_kernels(model: ModelConfig, device: torch.device) -> str:
    """`fa3` where it was made for: Hopper; else `fa2`."""
    is_hopper = torch.cuda.get_device_capability(device)[0] == 9
    return "fa3" if is_hopper and model.head_dim in (64, 128, 256) else "fa2"


def build(context: BuildContext) -> FlashInferBackend:
    """The backend over the installed package; ImportError where it does not import."""
    import flashinfer  # pyright: ignore[reportMissingImports]

    return FlashInferBackend(
        context.model,
        context.dtype,
        context.device,
        flashinfer,
        prefill_kernels=_prefill_kernels(context.model, context.device),
        cuda=torch.cuda,
    )
