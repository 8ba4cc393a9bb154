"""Who may compute attention over paged keys and values: all backends, best first.

The limits of flashinfer and vllm_flash_attn are those of FlashInfer 0.6 and vLLM's FlashAttention 2
as their packages document them; an adapter that widens them moves the record beside its code.
"""

from __future__ import annotations

from ..planning.candidate import Candidate, recorded
from ..planning.capability import Capability

FLASHINFER = Capability(
    name="flashinfer",
    kind="attention",
    source="runtime/attention/flashinfer.py",
    devices=("cuda",),
    dtypes=("bfloat16", "float16"),
    head_dims=(64, 128, 256),
    min_compute_capability=(7, 5),
    sliding_window=True,
    packages=("flashinfer",),
    built=False,
)
VLLM_FLASH_ATTN = Capability(
    name="vllm_flash_attn",
    kind="attention",
    source="runtime/attention/vllm_flash_attn.py",
    devices=("cuda",),
    dtypes=("bfloat16", "float16"),
    page_sizes=(16, 32, 64, 128, 256),
    head_dims=tuple(range(8, 257, 8)),
    min_compute_capability=(8, 0),
    sliding_window=True,
    packages=("vllm_flash_attn",),
    built=False,
)
TRITON = Capability(
    name="triton",
    kind="attention",
    source="runtime/attention/triton.py",
    devices=("cuda",),
    head_dims=(32, 64, 128, 256),
    min_compute_capability=(7, 5),
    sliding_window=True,
    packages=("triton",),
    built=False,
)
CANDIDATES = (
    recorded(FLASHINFER),
    recorded(VLLM_FLASH_ATTN),
    recorded(TRITON),
    Candidate("cpu_native", "attention.cpu_native"),
    Candidate("torch_sdpa", "attention.torch_sdpa"),
)
