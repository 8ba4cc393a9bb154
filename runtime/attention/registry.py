"""Who may compute attention over paged keys and values: all backends."""

from __future__ import annotations

from ..planning.candidate import Candidate

CANDIDATES = (
    Candidate("flashinfer", "attention.flashinfer"),
    Candidate("vllm_flash_attn", "attention.vllm_flash_attn"),
    Candidate("triton", "attention.triton"),
    Candidate("cpu_native", "attention.cpu_native"),
    Candidate("torch_sdpa", "attention.torch_sdpa"),
)
