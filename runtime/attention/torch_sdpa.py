"""Attention by torch's scaled_dot_product_attention over gathered pages: runs everywhere and
defines what is right.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...kernels.paged_attention import causal_mask, decode_attention, prefill_attention
from ...kernels.store_kv import kv_rows
from ..build_context import BuildContext
from ..config import ModelConfig
from ..forward_batch import ForwardBatch
from ..planning.capability import Capability

CAPABILITY = Capability(
    name="torch_sdpa",
    kind="attention",
    source="runtime/attention/torch_sdpa.py",
    devices=("cpu", "cuda"),
    sliding_window=True,
)

SMALLEST_GROUP = (
    256  # tokens; decode rows are padded to their group's longest, at most twice their own length
)


@dataclass(frozen=True, slots=True)
class _Decode:
    """Decode rows of similar length, attended in one call."""

    tokens: torch.Tensor  # int64 [b], which of the T tokens
    is_whole: bool  # all T tokens, in order
    k_rows: torch.Tensor  # int64 [b, L]
    masks: dict[int | None, torch.Tensor]  # window -> additive [b, L]


@dataclass(frozen=True, slots=True)
class _Prefill:
    """The new tokens of one request."""

    start: int
    stop: int
    k_rows: torch.Tensor  # int64 [L]
    masks: dict[int | None, torch.Tensor]  # window -> additive [Q, L]


class TorchSdpaBackend:
    """Decode rows are gathered into padded batches of similar length; prefill rows run one request
    at a time.
    """

    name = "torch_sdpa"

    def __init__(self, model: ModelConfig, dtype: torch.dtype) -> None:
        self._scale = model.head_dim**-0.5
        self._windows = model.layer_windows or (None,) * model.num_layers
        self._distinct = sorted(set(self._windows), key=lambda w: w or 0)
        self._dtype = dtype
        self._decodes: list[_Decode] = []
        self._prefills: list[_Prefill] = []

    def plan(self, batch: ForwardBatch) -> None:
        """Split rows into decode groups and prefills; make their key rows and masks."""
        widths = [b - a for a, b in zip(batch.query_starts, batch.query_starts[1:], strict=False)]
        decode_rows = [i for i, width in enumerate(widths) if width == 1]
        groups: dict[int, list[int]] = {}
        for i in decode_rows:
            groups.setdefault(max(batch.kv_lens[i], SMALLEST_GROUP).bit_length(), []).append(i)
        whole = len(groups) == 1 and len(decode_rows) == batch.num_rows
        self._decodes = [self._plan_decode(batch, rows, whole) for rows in groups.values()]
        self._prefills = [self._plan_prefill(batch, i) for i, w in enumerate(widths) if w > 1]

    def _plan_decode(self, batch: ForwardBatch, rows: list[int], whole: bool) -> _Decode:
        device = batch.page_table.device
        lens = torch.tensor([batch.kv_lens[i] for i in rows], device=device)
        longest = int(max(batch.kv_lens[i] for i in rows))
        keys = torch.arange(longest, device=device)
        absent = keys[None, :] >= lens[:, None]
        index = torch.tensor(rows, device=device)
        slots = _slots(batch, batch.page_table.index_select(0, index), longest)
        slots.masked_fill_(absent, 0)
        masks = {}
        for window in self._distinct:
            hidden = absent if window is None else absent | (keys < lens[:, None] - window)
            mask = torch.zeros(len(rows), longest, dtype=self._dtype, device=device)
            masks[window] = mask.masked_fill_(hidden, float("-inf"))
        tokens = torch.tensor([batch.query_starts[i] for i in rows], device=device)
        return _Decode(tokens, whole, kv_rows(slots, batch.page_size), masks)

    def _plan_prefill(self, batch: ForwardBatch, row: int) -> _Prefill:
        start, stop = batch.query_starts[row], batch.query_starts[row + 1]
        kv_len = batch.kv_lens[row]
        first = kv_len - (stop - start)
        slots = _slots(batch, batch.page_table[row : row + 1], kv_len)[0]
        masks = {
            window: causal_mask(first, stop - start, kv_len, window, self._dtype).to(slots.device)
            for window in self._distinct
        }
        return _Prefill(start, stop, kv_rows(slots, batch.page_size), masks)

    def attend(self, q_TND: torch.Tensor, kv_layer: torch.Tensor, layer: int) -> torch.Tensor:
        """Attention of the planned batch. Returns [T, N, D]."""
        window = self._windows[layer]
        if self._decodes and self._decodes[0].is_whole:
            group = self._decodes[0]
            return decode_attention(q_TND, kv_layer, group.k_rows, group.masks[window], self._scale)
        out = torch.empty_like(q_TND)
        for group in self._decodes:
            q = q_TND.index_select(0, group.tokens)
            attended = decode_attention(q, kv_layer, group.k_rows, group.masks[window], self._scale)
            out.index_copy_(0, group.tokens, attended)
        for row in self._prefills:
            out[row.start : row.stop] = prefill_attention(
                q_TND[row.start : row.stop], kv_layer, row.k_rows, row.masks[window], self._scale
            )
        return out


def _slots(batch: ForwardBatch, page_table: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Slots int64 [B, num_tokens] of the first tokens of each row of `page_table`."""
    num_pages = -(-num_tokens // batch.page_size)
    pages = page_table[:, :num_pages].to(torch.int64)
    offsets = torch.arange(batch.page_size, device=pages.device)
    slots = pages[:, :, None] * batch.page_size + offsets
    return slots.view(pages.shape[0], -1)[:, :num_tokens].contiguous()


def build(context: BuildContext) -> TorchSdpaBackend:
    """The backend for one model, with queries in the plan's dtype."""
    return TorchSdpaBackend(context.model, context.dtype)
