"""The packages that carry FlashAttention, in the order in which they are tried. Each spells the
same call differently; why one cannot be used is kept, to be read in the plan's events.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch

from ..errors import EngineError


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashCall:
    """Causal attention of a batch over its pages. Of B requests, all int32 tensors on the device.

    `max_kv` and `max_queries` are at least the longest; within a graph they never change.
    """

    query_starts: torch.Tensor  # [B + 1]
    kv_lens: torch.Tensor  # [B]
    kv_starts: torch.Tensor  # [B + 1], sums of kv_lens
    page_table: torch.Tensor  # [B, max_pages]
    max_queries: int
    max_kv: int
    page_size: int
    scale: float
    num_splits: int = 0  # 0: as the kernel sees fit; in a graph an upper bound


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """Shape of a model's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


class FlashPackage(Protocol):
    """One spelling."""

    name: str
    version: int  # of FlashAttention: 2 or 3

    def attend(
        self,
        q_TND: torch.Tensor,
        keys: torch.Tensor,  # [P, S, K, D]
        values: torch.Tensor,
        call: FlashCall,
        window: tuple[int, int],  # keys before and after the query's own; -1: all
        metadata: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention [T, N, D]."""
        ...

    def metadata(
        self, heads: Heads, call: FlashCall, window: tuple[int, int]
    ) -> torch.Tensor | None:
        """FA3's schedule of a batch, int32 on the device; None where there is none."""
        ...


class Unfit(EngineError):
    """A package cannot be used; the text says why."""


class VllmPackage:
    """`vllm.vllm_flash_attn`, which comes inside vllm."""

    name = "vllm.vllm_flash_attn"

    def __init__(self, module: Any, version: int) -> None:  # a module without types
        self.version = version
        self._module = module

    def attend(
        self,
        q_TND: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        call: FlashCall,
        window: tuple[int, int],
        metadata: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `FlashPackage`."""
        only_fa3: dict[str, Any] = {}
        if self.version == 3:
            only_fa3 = {"scheduler_metadata": metadata, "num_splits": call.num_splits}
        return self._module.flash_attn_varlen_func(
            q_TND,
            keys,
            values,
            max_seqlen_q=call.max_queries,
            cu_seqlens_q=call.query_starts,
            max_seqlen_k=call.max_kv,
            seqused_k=call.kv_lens,
            softmax_scale=call.scale,
            causal=True,
            window_size=list(window),
            block_table=call.page_table,
            fa_version=self.version,
            **only_fa3,
        )

    def metadata(
        self, heads: Heads, call: FlashCall, window: tuple[int, int]
    ) -> torch.Tensor | None:
        """See `FlashPackage`."""
        if self.version != 3:
            return None
        return self._module.get_scheduler_metadata(
            batch_size=call.kv_lens.shape[0],
            max_seqlen_q=call.max_queries,
            max_seqlen_k=call.max_kv,
            num_heads_q=heads.num_heads,
            num_heads_kv=heads.num_kv_heads,
            headdim=heads.head_dim,
            cache_seqlens=call.kv_lens,
            qkv_dtype=heads.dtype,
            cu_seqlens_q=call.query_starts,
            page_size=call.page_size,
            causal=True,
            window_size=window,
            num_splits=call.num_splits,
        )


class ExtensionPackage:
    """vLLM's FA3 extension alone: torch.ops._vllm_fa3_C, whose arguments go by place."""

    name = "_vllm_fa3_C"
    version = 3

    def __init__(self, ops: Any) -> None:  # a torch namespace
        self._ops = ops

    def attend(
        self,
        q_TND: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        call: FlashCall,
        window: tuple[int, int],
        metadata: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `FlashPackage`."""
        new_keys = (None, None, None, None)  # k_new, v_new, q_v, out
        starts = (call.query_starts, None, None)  # of q, k, k_new
        rows = (call.page_table, None, None)  # page_table, kv_batch_idx, leftpad_k
        rotary = (None, None, None)
        scales = (None, None, None)  # of q, k, v
        lens = (None, call.kv_lens, call.max_queries, call.max_kv)
        form = (call.scale, True, *window, 0.0, True, metadata, call.num_splits, None, 0)
        ending = (None, 1, 0, None)  # s_aux, cp_world_size, cp_rank, cp_tot_seqused_k
        return self._ops.fwd(
            q_TND, keys, values, *new_keys, *starts, *lens, *rows, *rotary, *scales, *form, *ending
        )[0]

    def metadata(self, heads: Heads, call: FlashCall, window: tuple[int, int]) -> torch.Tensor:
        """See `FlashPackage`."""
        sizes = (call.kv_lens.shape[0], call.max_queries, call.max_kv)
        shape = (heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.head_dim, heads.dtype)
        starts = (call.query_starts, None, None, None, None)  # of q, k, k_new; seqused_q, leftpad_k
        form = (call.page_size, 0, True, *window, False, call.num_splits, None, 0)
        return self._ops.get_scheduler_metadata(*sizes, *shape, call.kv_lens, *starts, *form)


class UpstreamFa3Package:
    """`flash_attn_interface`: FA3 as its authors build it."""

    name = "flash_attn_interface"
    version = 3

    def __init__(self, module: Any) -> None:  # a module without types
        self._module = module

    def attend(
        self,
        q_TND: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        call: FlashCall,
        window: tuple[int, int],
        metadata: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `FlashPackage`."""
        return self._module.flash_attn_with_kvcache(
            q_TND,
            keys,
            values,
            cache_seqlens=call.kv_lens,
            page_table=call.page_table,
            cu_seqlens_q=call.query_starts,
            max_seqlen_q=call.max_queries,
            softmax_scale=call.scale,
            causal=True,
            window_size=window,
            num_splits=call.num_splits,
        )

    def metadata(self, heads: Heads, call: FlashCall, window: tuple[int, int]) -> None:
        """None: it makes its schedule on the device, within the call."""


class VarlenPackage:
    """FA2 by `flash_attn_varlen_func(..., block_table=)`: flash_attn, and vllm_flash_attn of
    2024.
    """

    version = 2

    def __init__(self, name: str, module: Any) -> None:  # a module without types
        self.name = name
        self._module = module

    def attend(
        self,
        q_TND: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        call: FlashCall,
        window: tuple[int, int],
        metadata: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `FlashPackage`."""
        return self._module.flash_attn_varlen_func(
            q_TND,
            keys,
            values,
            cu_seqlens_q=call.query_starts,
            cu_seqlens_k=call.kv_starts,
            max_seqlen_q=call.max_queries,
            max_seqlen_k=call.max_kv,
            softmax_scale=call.scale,
            causal=True,
            window_size=window,
            block_table=call.page_table,
        )

    def metadata(self, heads: Heads, call: FlashCall, window: tuple[int, int]) -> None:
        """None: FA2 has no schedule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What a package must fit: the card, the plan's pages, and a file that the user named."""

    compute_capability: tuple[int, int]
    page_size: int
    extension: str | None = None
    load: Callable[[str], Any] = import_module  # a test puts its own in its place


def find_package(wanted: Wanted) -> tuple[FlashPackage | None, list[str]]:
    """The first package that can be used, and a sentence for each one that was passed over."""
    refused: list[str] = []
    for name, opener in OPENERS.items():
        try:
            return opener(wanted), refused
        except (ImportError, OSError, AttributeError, RuntimeError, Unfit) as error:
            text = str(error).strip() or type(error).__name__
            refused.append(f"{name}: {text.splitlines()[0]}")
    return None, refused


def _vllm(wanted: Wanted) -> FlashPackage:
    module = wanted.load("vllm.vllm_flash_attn")
    is_hopper = wanted.compute_capability[0] == 9
    if is_hopper and module.is_fa_version_supported(3):
        return VllmPackage(module, 3)
    if module.is_fa_version_supported(2):
        _require_pages(wanted, 16)
        return VllmPackage(module, 2)
    raise Unfit(f"its FlashAttention 2 cannot run: {module.fa_version_unsupported_reason(2)}")


def _extension(wanted: Wanted) -> FlashPackage:
    if wanted.extension is None:
        raise Unfit("no file was named (--flash-attn-library)")
    _require_hopper(wanted)
    torch.ops.load_library(wanted.extension)
    ops = torch.ops._vllm_fa3_C
    _ = ops.fwd, ops.get_scheduler_metadata  # AttributeError where the file has neither
    return ExtensionPackage(ops)


def _upstream_fa3(wanted: Wanted) -> FlashPackage:
    _require_hopper(wanted)
    module = wanted.load("flash_attn_interface")
    _ = module.flash_attn_with_kvcache
    return UpstreamFa3Package(module)


def _flash_attn(wanted: Wanted) -> FlashPackage:
    module = wanted.load("flash_attn")
    if _numbers(module.__version__) < (2, 8):
        raise Unfit(f"version {module.__version__} is older than 2.8")
    _require_pages(wanted, 256)
    return VarlenPackage("flash_attn", module)


def _vllm_flash_attn(wanted: Wanted) -> FlashPackage:
    pin = "2.4.0"
    if not torch.__version__.startswith(pin):
        raise Unfit(f"it is built for torch {pin} alone, and this is {torch.__version__}")
    _require_pages(wanted, 16)
    return VarlenPackage("vllm_flash_attn", wanted.load("vllm_flash_attn"))


OPENERS: dict[str, Callable[[Wanted], FlashPackage]] = {
    "vllm.vllm_flash_attn": _vllm,
    "_vllm_fa3_C": _extension,
    "flash_attn_interface": _upstream_fa3,
    "flash_attn": _flash_attn,
    "vllm_flash_attn": _vllm_flash_attn,
}
"""Best first."""


def _require_hopper(wanted: Wanted) -> None:
    if wanted.compute_capability[0] != 9:
        major, minor = wanted.compute_capability
        raise Unfit(f"FlashAttention 3 needs compute capability 9.0; this card has {major}.{minor}")


def _require_pages(wanted: Wanted, multiple: int) -> None:
    if wanted.page_size % multiple:
        raise Unfit(
            f"it takes pages of a multiple of {multiple} tokens; this plan has {wanted.page_size}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
