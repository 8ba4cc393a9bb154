"""Attention by our Triton kernels: reads pages in place. Rows with one new token go through the
decode kernel and all others through the prefill kernel, whatever stands beside them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise

import torch

from ...kernels.triton.decode_attention import decode_attention
from ...kernels.triton.paged import PagedRows, Scores
from ...kernels.triton.prefill_attention import prefill_attention
from ..build_context import BuildContext
from ..config import ModelConfig
from ..forward_batch import ForwardBatch
from ..planning.capability import Capability

# Triton has the system's compiler build its launcher, at the first launch.
CAPABILITY = Capability(
    name="triton",
    kind="attention",
    source="runtime/attention/triton.py",
    devices=("cuda",),
    head_dims=(16, 32, 64, 80, 96, 128, 256),
    max_group_size=16,
    min_compute_capability=(7, 5),
    sliding_window=True,
    soft_cap=True,
    graph_support="always",
    batch_invariant=True,
    packages=("triton>=3.6",),
    needs_compiler=True,
)


class TritonBackend:
    """A row's result does not depend on its neighbours: tiles and splits lie at places that follow
    from its own length. One token computed by the decode kernel differs in its last bits from the
    same token as a part of a longer chunk.
    """

    name = "triton"

    def __init__(self, model: ModelConfig) -> None:
        windows = model.layer_windows or (None,) * model.num_layers
        self._scores = tuple(
            Scores(model.head_dim**-0.5, window, model.attention_soft_cap) for window in windows
        )
        self._rows: PagedRows | None = None
        self._has_decodes = self._has_prefills = False

    def plan(self, batch: ForwardBatch) -> None:
        """Lengths of this step as int32 tensors, which the kernels read."""
        device = batch.page_table.device
        lengths = _lengths(batch.kv_lens, batch.query_starts)
        if device.type != "cpu":
            lengths = lengths.pin_memory().to(device, non_blocking=True)
        self.read_from(_paged_rows(batch.page_table, lengths), batch.query_starts)

    def attend(self, q_TND: torch.Tensor, kv_layer: torch.Tensor, layer: int) -> torch.Tensor:
        """Attention of the planned batch. Returns [T, N, D]."""
        assert self._rows is not None, "plan comes before attend"
        out_TND = torch.empty(q_TND.shape, dtype=q_TND.dtype, device=q_TND.device)
        if self._has_decodes:
            decode_attention(q_TND, kv_layer, self._rows, self._scores[layer], out_TND)
        if self._has_prefills:
            prefill_attention(q_TND, kv_layer, self._rows, self._scores[layer], out_TND)
        return out_TND

    def prepare_capture(self, batch: ForwardBatch) -> TritonCaptured:
        """Static lengths beside the batch's static page table."""
        return TritonCaptured(self, batch)

    def read_from(self, rows: PagedRows, query_starts: Sequence[int]) -> None:
        """Let `attend` read these tensors; the starts, as the host knows them, say which kernels
        have work.
        """
        widths = [stop - start for start, stop in pairwise(query_starts)]
        self._rows = rows
        self._has_decodes, self._has_prefills = 1 in widths, any(width > 1 for width in widths)


class TritonCaptured:
    """Lengths at a fixed address. Padding is rows of one token, which see one of the scratch
    page; both kernels find out when they run which rows are theirs.
    """

    def __init__(self, backend: TritonBackend, batch: ForwardBatch) -> None:
        self._backend = backend
        self._num_tokens, self._num_rows = batch.num_tokens, batch.num_rows
        self._query_starts = batch.query_starts
        lengths = _lengths(batch.kv_lens, batch.query_starts)
        self._lengths = lengths.to(batch.page_table.device)
        self._rows = _paged_rows(batch.page_table, self._lengths)

    def refresh(self, batch: ForwardBatch) -> None:
        """This step's lengths."""
        padding = self._num_rows - batch.num_rows
        is_decode = self._num_tokens == self._num_rows
        assert not is_decode or batch.num_tokens == batch.num_rows, "this graph is for decodes"
        tokens, most = batch.num_tokens, self._num_tokens
        starts = *batch.query_starts, *(min(tokens + i + 1, most) for i in range(padding))
        lengths = _lengths((*batch.kv_lens, *(1,) * padding), starts)
        if self._lengths.device.type != "cpu":
            lengths = lengths.pin_memory()
        self._lengths.copy_(lengths, non_blocking=True)

    def use(self) -> None:
        """Let the backend read from here."""
        self._backend.read_from(self._rows, self._query_starts)

    def inputs(self) -> Sequence[torch.Tensor]:
        """Static tensors."""
        return (self._lengths,)


def _lengths(kv_lens: Sequence[int], query_starts: Sequence[int]) -> torch.Tensor:
    """int32 on the host: B lengths up to a multiple of 16 bytes, by which kernels are specialised,
    then B + 1 starts.
    """
    padding = (0,) * (-len(kv_lens) % 4)
    return torch.frombuffer(array("i", (*kv_lens, *padding, *query_starts)), dtype=torch.int32)


def _paged_rows(page_table: torch.Tensor, lengths: torch.Tensor) -> PagedRows:
    num_rows = page_table.shape[0]
    starts = num_rows + -num_rows % 4
    return PagedRows(page_table, lengths[starts:], lengths[:num_rows])


def build(context: BuildContext) -> TritonBackend:
    """The backend for one model."""
    return TritonBackend(context.model)
