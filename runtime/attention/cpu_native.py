"""Attention by our native CPU kernel: reads pages in place, decode and prefill rows in one call a
layer.
"""

from __future__ import annotations

import torch

from ...kernels.cpu import ops as native
from ...kernels.cpu.library import Library
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


def build(context: BuildContext) -> CpuNativeBackend:
    """The backend over the plan's build of the kernels."""
    return CpuNativeBackend(context.model, context.native)
