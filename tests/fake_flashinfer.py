"""FlashInfer's wrappers in plain torch, with the names, orders and checks of version 0.6.18: what
the adapter calls wrongly fails here as it would there.

A plan writes lengths into the wrapper's own workspace and a run reads them from there, so a plan
that is missing or stale shows in the results.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

Numbers = list[int]


class BatchDecodeWithPagedKVCacheWrapper:
    """One query a request."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[object] | None = None,
    ) -> None:
        assert kv_layout == "NHD" and not float_workspace_buffer.any(), "zeroed before first use"
        self.is_cuda_graph_enabled = use_cuda_graph
        self.use_tensor_cores = use_tensor_cores
        self.num_full_plans = 0
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None and paged_kv_indices_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            self._fixed_batch_size = len(paged_kv_last_page_len_buffer)
            if len(paged_kv_indptr_buffer) != self._fixed_batch_size + 1:
                raise ValueError("The size of paged_kv_indptr_buffer should be batch_size + 1")
            self._kv_lens = torch.zeros(self._fixed_batch_size, dtype=torch.int32)
            self.indptr, self.indices = paged_kv_indptr_buffer, paged_kv_indices_buffer
            self.last_page_len = paged_kv_last_page_len_buffer

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: torch.dtype | str | None = None,
        o_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
        non_blocking: bool = True,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> None:
        self.num_full_plans += 1
        if self.is_cuda_graph_enabled:
            self._check_captured(indices, last_page_len)
            self.indptr.copy_(indptr)
            self.last_page_len.copy_(last_page_len)
            self.indices[: len(indices)].copy_(indices)
        else:
            self.indptr, self.indices, self.last_page_len = indptr, indices, last_page_len
        self._group = num_qo_heads // num_kv_heads
        if not self.use_tensor_cores and self._group not in (1, 2, 3, 4, 6, 8):
            raise RuntimeError(f"no kernel for {self._group} query heads a key/value head")
        self._set_plan(indptr, last_page_len, page_size, window_left, sm_scale)

    def _check_captured(self, indices: torch.Tensor, last_page_len: torch.Tensor) -> None:
        if len(last_page_len) != self._fixed_batch_size:
            raise ValueError("The batch size should be fixed in cudagraph mode")
        if len(indices) > len(self.indices):
            raise ValueError("The size of indices should not exceed the allocated buffer")

    def _set_plan(
        self,
        indptr: torch.Tensor,
        last_page_len: torch.Tensor,
        page_size: int,
        window_left: int,
        sm_scale: float | None,
    ) -> None:
        assert indptr.device.type == last_page_len.device.type == "cpu", "else the plan waits"
        lens = (indptr[1:] - indptr[:-1] - 1) * page_size + last_page_len
        assert lens.dtype == torch.int32 and (lens > 0).all()
        if self.is_cuda_graph_enabled:
            self._kv_lens.copy_(lens)
        else:
            self._kv_lens = lens
        self._window, self._scale, self._page_size = window_left, sm_scale, page_size

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
        window_left: int | None = None,
    ) -> torch.Tensor:
        rows = len(self.last_page_len)
        assert q.shape[0] == rows and q.is_contiguous() and paged_kv_cache.dim() == 5
        counts = self.indptr[1:] - self.indptr[:-1]
        width = max(1, len(self.indices) // rows) if self.is_cuda_graph_enabled else _most(counts)
        columns = torch.arange(width)
        at = (self.indptr[:-1, None] + columns).clamp(max=len(self.indices) - 1)
        held = (counts - 1) * self._page_size + self.last_page_len
        lens = torch.minimum(held, self._kv_lens)
        return _attend(q, paged_kv_cache, self.indices[at], lens, self._window, self._scale)


class BatchPrefillWithPagedKVCacheWrapper:
    """Any number of queries a request."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert kv_layout == "NHD" and not use_cuda_graph and backend in ("auto", "fa2", "fa3")

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: torch.dtype | str | None = None,
    ) -> None:
        assert causal, "a prefill sees no later key"
        for tensor in (qo_indptr, paged_kv_indptr, paged_kv_last_page_len):
            assert tensor.dtype == torch.int32 and tensor.device.type == "cpu"
        self._starts = qo_indptr.tolist()
        self._indptr, self._indices = paged_kv_indptr.tolist(), paged_kv_indices
        self._last = paged_kv_last_page_len.tolist()
        self._window, self._scale, self._page_size = window_left, sm_scale, page_size

    def run(
        self, q: torch.Tensor, paged_kv_cache: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert q.shape[0] == self._starts[-1]
        return torch.cat([self._row(q, paged_kv_cache, i) for i in range(len(self._last))])

    def _row(self, q: torch.Tensor, cache: torch.Tensor, row: int) -> torch.Tensor:
        """Each query of the row as a request of its own, one key longer than the one before."""
        queries = q[self._starts[row] : self._starts[row + 1]]
        pages = self._indices[self._indptr[row] : self._indptr[row + 1]]
        length = (len(pages) - 1) * self._page_size + self._last[row]
        lens = torch.arange(length - len(queries) + 1, length + 1)
        table = pages.expand(len(queries), -1)
        return _attend(queries, cache, table, lens, self._window, self._scale)


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: torch.dtype | str | None = None,
    kv_data_type: torch.dtype | str | None = None,
    data_type: torch.dtype | str | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: torch.Tensor | None = None,
) -> None:
    """Leaves the page table alone: it must be where the wrapper reads it."""
    assert self.num_full_plans, "a full plan finds the module first"
    self._check_captured(indices, last_page_len)
    host = indptr if global_override_indptr_cpu is None else global_override_indptr_cpu
    self._set_plan(host, last_page_len, page_size, window_left, sm_scale)


def _attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    lens: torch.Tensor,
    window_left: int,
    scale: float | None,
) -> torch.Tensor:
    """One query a row over the pages of its row of `table`."""
    rows, heads, head_dim = q.shape
    held = cache[table.long()].transpose(1, 2).flatten(2, 3)  # [B, 2, W * S, K, D]
    keys, values = held[:, 0].float(), held[:, 1].float()
    at = torch.arange(keys.shape[1])
    hidden = at >= lens[:, None]
    if window_left >= 0:
        hidden = hidden | (at < lens[:, None] - 1 - window_left)
    group = heads // keys.shape[2]
    grouped = q.float().view(rows, -1, group, head_dim)
    scores = torch.einsum("bkgd,bskd->bkgs", grouped, keys) * (scale or head_dim**-0.5)
    weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(dim=-1)
    values = values.masked_fill(hidden[:, :, None, None], 0)
    out = torch.einsum("bkgs,bskd->bkgd", weights, values)
    return out.reshape(rows, heads, head_dim).to(q.dtype)


def _most(counts: torch.Tensor) -> int:
    return int(counts.max())


module = SimpleNamespace(
    BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
    decode=SimpleNamespace(fast_decode_plan=fast_decode_plan),
)
"""What `import flashinfer` would give."""
