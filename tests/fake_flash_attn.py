"""The packages that carry FlashAttention in plain torch, with the signatures of vLLM 0.25, of
flash_attn 2.8 and of its FA3: what the adapter calls wrongly fails here as it would there.

A schedule of FA3 holds the lengths that it was made for and a run believes it, so one that is stale
shows in the results.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

Window = tuple[int, int] | list[int]


def paged_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    lens: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    table: torch.Tensor,
    scale: float,
    window: Window,
) -> torch.Tensor:
    """Causal attention over pages; shapes depend on sizes alone, as in a graph."""
    for tensor in (cu_seqlens_q, lens, table):
        assert tensor.dtype == torch.int32
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == table.stride(-1) == 1
    assert len(cu_seqlens_q) == len(lens) + 1 and table.shape[0] == len(lens)
    assert max_seqlen_k <= table.shape[1] * k.shape[1], "more keys than pages"
    tokens, heads, head_dim = q.shape
    starts = cu_seqlens_q.long()
    row = torch.searchsorted(starts, torch.arange(tokens), right=True) - 1
    position = lens[row] - starts[row + 1] + torch.arange(tokens)  # of the query, in its sequence
    pages = -(-max_seqlen_k // k.shape[1])
    keys = k[table[row, :pages].long()].flatten(1, 2).float()  # [T, S, K, D]
    values = v[table[row, :pages].long()].flatten(1, 2).float()
    at = torch.arange(keys.shape[1])
    hidden = at > position[:, None]
    if window[0] >= 0:
        hidden = hidden | (at < position[:, None] - window[0])
    grouped = q.float().view(tokens, keys.shape[2], -1, head_dim)
    scores = torch.einsum("tkgd,tskd->tkgs", grouped, keys) * scale
    weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(dim=-1)
    values = values.masked_fill(hidden[:, :, None, None], 0)
    out = torch.einsum("tkgs,tskd->tkgd", weights, values)
    return out.reshape(tokens, heads, head_dim).to(q.dtype)


def schedule_of(cache_seqlens: torch.Tensor, num_splits: int) -> torch.Tensor:
    """int32 [1 + round_up(B, 4)], of the lengths."""
    rows = len(cache_seqlens)
    made = torch.zeros(1 + -(-rows // 4) * 4, dtype=torch.int32)
    made[0] = num_splits
    made[1 : 1 + rows] = cache_seqlens
    return made


def scheduled(
    lens: torch.Tensor, scheduler_metadata: torch.Tensor | None, num_splits: int
) -> torch.Tensor:
    """The lengths that a run believes."""
    if scheduler_metadata is None:
        return lens
    rows = len(lens)
    assert scheduler_metadata.dtype == torch.int32 and num_splits > 0, "a graph has a bound"
    return torch.minimum(lens, scheduler_metadata[1 : 1 + rows])


class Vllm:
    """The module vllm.vllm_flash_attn."""

    def __init__(self, *versions: int) -> None:
        self._versions = versions

    def is_fa_version_supported(self, fa_version: int, device: object = None) -> bool:
        return fa_version in self._versions

    def fa_version_unsupported_reason(self, fa_version: int, device: object = None) -> str | None:
        return None if fa_version in self._versions else f"FA{fa_version} is not in this build"

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        max_seqlen_q: int,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_k: int,
        cu_seqlens_k: torch.Tensor | None = None,
        seqused_k: torch.Tensor | None = None,
        q_v: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: list[int] | None = None,
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: torch.Tensor | None = None,
        return_softmax_lse: bool = False,
        out: torch.Tensor | None = None,
        scheduler_metadata: torch.Tensor | None = None,
        q_descale: torch.Tensor | None = None,
        k_descale: torch.Tensor | None = None,
        v_descale: torch.Tensor | None = None,
        num_splits: int = 0,
        fa_version: int = 2,
        s_aux: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert causal and seqused_k is not None and block_table is not None and cu_seqlens_k is None
        assert fa_version in self._versions and softmax_scale is not None
        if fa_version == 2:
            assert scheduler_metadata is None and num_splits <= 1 and k.shape[1] % 16 == 0
        lens = scheduled(seqused_k, scheduler_metadata, num_splits)
        window = window_size or (-1, -1)
        sizes = (max_seqlen_q, max_seqlen_k)
        return paged_varlen(q, k, v, cu_seqlens_q, lens, *sizes, block_table, softmax_scale, window)

    def get_scheduler_metadata(
        self,
        batch_size: int,
        max_seqlen_q: int,
        max_seqlen_k: int,
        num_heads_q: int,
        num_heads_kv: int,
        headdim: int,
        cache_seqlens: torch.Tensor,
        qkv_dtype: torch.dtype = torch.bfloat16,
        headdim_v: int | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k_new: torch.Tensor | None = None,
        cache_leftpad: torch.Tensor | None = None,
        page_size: int | None = None,
        max_seqlen_k_new: int = 0,
        causal: bool = False,
        window_size: Window = (-1, -1),
        has_softcap: bool = False,
        num_splits: int = 0,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
    ) -> torch.Tensor:
        assert causal and page_size and batch_size == len(cache_seqlens)
        return schedule_of(cache_seqlens, num_splits)


def _with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor:
    assert causal and page_table is not None and cache_seqlens is not None
    assert cu_seqlens_q is not None and max_seqlen_q is not None and softmax_scale is not None
    longest = page_table.shape[1] * k_cache.shape[1]
    sizes = (max_seqlen_q, longest)
    return paged_varlen(
        q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, *sizes, page_table, softmax_scale,
        window_size,
    )  # fmt: skip


def _varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    assert causal and block_table is not None and softmax_scale is not None
    if k.shape[1] % 256:
        raise RuntimeError("Paged KV cache block size must be divisible by 256")
    lens = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
    sizes = (max_seqlen_q, max_seqlen_k)
    return paged_varlen(
        q, k, v, cu_seqlens_q, lens, *sizes, block_table, softmax_scale, window_size
    )


upstream_fa3 = SimpleNamespace(flash_attn_with_kvcache=_with_kvcache)
"""The module flash_attn_interface."""

flash_attn = SimpleNamespace(__version__="2.8.3", flash_attn_varlen_func=_varlen)
"""The module flash_attn."""

FWD = (
    "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, "
    "Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, "
    "Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, "
    "Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "float softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
    "float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, "
    "bool? pack_gqa, int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, "
    "Tensor? cp_tot_seqused_k) -> Tensor[]"
)
METADATA = (
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, "
    "int num_heads_k, int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, "
    "Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, bool is_causal, "
    "int window_size_left, int window_size_right, bool has_softcap, int num_splits, "
    "bool? pack_gqa, int sm_margin) -> Tensor"
)


@cache
def extension() -> Any:  # a torch namespace
    """torch.ops of vLLM's FA3 extension, registered with its own schema."""
    library = torch.library.Library("polypath_fake_fa3", "DEF")
    library.define(FWD)
    library.define(METADATA)
    library.impl("fwd", _fwd, "CPU")
    library.impl("get_scheduler_metadata", _metadata, "CPU")
    extension_libraries.append(library)  # which undoes all when it goes
    return torch.ops.polypath_fake_fa3


extension_libraries: list[torch.library.Library] = []


def _fwd(*given: Any) -> list[torch.Tensor]:  # of many types
    names = [word.split()[-1] for word in FWD[FWD.index("(") + 1 : FWD.index(")")].split(", ")]
    named = dict(zip(names, given, strict=True))
    assert named["is_causal"] and named["cp_world_size"] == 1 and named["softcap"] == 0.0
    lens = scheduled(named["seqused_k"], named["scheduler_metadata"], named["num_splits"])
    out = paged_varlen(
        named["q"].clone(), named["k"], named["v"], named["cu_seqlens_q"], lens,
        named["max_seqlen_q"], named["max_seqlen_k"], named["page_table"], named["softmax_scale"],
        (named["window_size_left"], named["window_size_right"]),
    )  # fmt: skip
    return [out, torch.zeros(1), torch.zeros(1), torch.zeros(1)]


def _metadata(*given: Any) -> torch.Tensor:  # of many types
    seqused_k, page_size, is_causal, num_splits = given[8], given[14], given[16], given[20]
    assert is_causal is True and page_size >= 1 and given[0] == len(seqused_k)
    return schedule_of(seqused_k, num_splits)
