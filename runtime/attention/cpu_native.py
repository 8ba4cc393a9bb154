"""Attention by our native CPU kernel: reads pages in place, decode and prefill rows in one call a
layer.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from ...kernels.cpu import ops as native
from ...kernels.cpu.library import Library
from ...kernels.transfer import host_view
from ..build_context import BuildContext
from ..config import ModelConfig
from ..forward_batch import ForwardBatch
from ..planning.capability import Capability

CAPABILITY = Capability(
    name="cpu_native",
    kind="attention",
    source="runtime/attention/cpu_native.py",
    devices=("cpu",),
    dtypes=("float32",),
    kv_dtypes=("float32", "bfloat16"),
    sliding_window=True,
    graph_support="always",
    batch_invariant=True,
    native_kernels=True,
)


class CpuNativeBackend:
    """A token's result depends neither on its neighbours nor on how its prompt was cut or cached:
    keys are summed in ranges of fixed places.
    """

    name = "cpu_native"

    def __init__(self, model: ModelConfig, library: Library) -> None:
        self._library = library
        self._scale = model.head_dim**-0.5
        self._windows = model.layer_windows or (None,) * model.num_layers
        self._page_table = self._query_starts = self._kv_lens = torch.empty(0, dtype=torch.int32)

    def plan(self, batch: ForwardBatch) -> None:
        """Lengths of this step as int32 tensors, which the kernel reads."""
        self._page_table = batch.page_table
        self._query_starts = torch.tensor(batch.query_starts, dtype=torch.int32)
        self._kv_lens = torch.tensor(batch.kv_lens, dtype=torch.int32)

    def attend(self, q_TND: torch.Tensor, kv_layer: torch.Tensor, layer: int) -> torch.Tensor:
        """Attention of the planned batch. Returns [T, N, D]."""
        return native.attention(
            self._library,
            q_TND,
            kv_layer,
            self._page_table,
            self._query_starts,
            self._kv_lens,
            self._windows[layer],
            self._scale,
        )

    def prepare_capture(self, batch: ForwardBatch) -> CpuNativeCaptured:
        """Static lengths beside the batch's static page table."""
        return CpuNativeCaptured(self, batch)

    def read_from(
        self, page_table: torch.Tensor, query_starts: torch.Tensor, kv_lens: torch.Tensor
    ) -> None:
        """Let `attend` read these int32 tensors."""
        self._page_table, self._query_starts, self._kv_lens = page_table, query_starts, kv_lens


class CpuNativeCaptured:
    """Lengths of decode rows at fixed addresses; padding sees one token of the scratch page."""

    def __init__(self, backend: CpuNativeBackend, batch: ForwardBatch) -> None:
        self._backend = backend
        self._page_table = batch.page_table
        self._query_starts = torch.tensor(batch.query_starts, dtype=torch.int32)
        self._kv_lens = torch.tensor(batch.kv_lens, dtype=torch.int32)
        self._lens_memory = host_view(self._kv_lens)
        self._num_filled = 0

    def refresh(self, batch: ForwardBatch) -> None:
        """This step's lengths; every row has one query."""
        assert batch.num_tokens == batch.num_rows, "graphs of whole steps are for decode batches"
        rows = batch.num_rows
        self._lens_memory[:rows] = array("i", batch.kv_lens)
        if rows < self._num_filled:
            self._lens_memory[rows : self._num_filled] = array("i", [1]) * (self._num_filled - rows)
        self._num_filled = rows

    def use(self) -> None:
        """Let the backend read from here."""
        self._backend.read_from(self._page_table, self._query_starts, self._kv_lens)

    def inputs(self) -> Sequence[torch.Tensor]:
        """Static tensors."""
        return self._query_starts, self._kv_lens


def build(context: BuildContext) -> CpuNativeBackend:
    """The backend over the plan's build of the kernels."""
    return CpuNativeBackend(context.model, context.native)
