"""Which candidates are tried on each class of device, best first. Who is on no list is refused.

Attention. vLLM tries FlashInfer before FlashAttention on sm_100 and after it elsewhere, Triton
last; SGLang takes fa3 on Hopper, else FlashInfer, else Triton. Where we differ:

- sm_75: FlashAttention needs 8.0 (vLLM #4246, #29743), and vLLM took Turing out of FlashInfer as
  broken; what is left is compiled for the card by Triton.
- sm_90: FlashAttention 3 first, as both do. SGLang #5630 (H20: 908 tokens/s against FlashInfer's
  2014) and #5938 say that no order is right for every card; `make gpu` is there to measure ours.
- sm_120 (consumer and workstation Blackwell): kernels of sm_100 and sm_90 do not run (SGLang
  #14842, #14814, #40558, #12178, #9140; vLLM #32732), and FlashAttention 2 only by a translation
  of its sm_80 code. Triton compiles for the card itself and is first.
- cuda: a card that no list knows, newer or unread: Triton, then torch.

Runners: a graph before pieces before eager, as SGLang and vLLM do. Ops and linear methods: kernels
made for the device before torch. On a CPU the same order serves every class: each rule that tells
them apart (instructions, architecture, installed builds) belongs to a candidate.
"""

from __future__ import annotations

from .capability import CandidateKind
from .device import first_usable_gpu
from .hardware import Hardware

GPU_CLASSES = {
    "sm_75": "7.5: T4",
    "sm_80": "8.0 to 8.9: A100, A10G, L4, RTX 4090",
    "sm_90": "9.0: H100, H200",
    "sm_100": "10.0 to 11.x: B200",
    "sm_120": "12.x: RTX 5090",
    "cuda": "any other",
}
CPU_CLASSES = {
    "cpu_amx": "x86_64 with AMX",
    "cpu_avx512": "x86_64 with AVX-512 VNNI",
    "cpu_avx2": "x86_64 with AVX2, FMA and F16C",
    "cpu_aarch64": "64-bit ARM",
    "cpu": "any other",
}
Lists = dict[str, tuple[str, ...]]

ATTENTION: Lists = {
    "sm_75": ("triton", "torch_sdpa"),
    "sm_80": ("vllm_flash_attn", "flashinfer", "triton", "torch_sdpa"),
    "sm_90": ("vllm_flash_attn", "flashinfer", "triton", "torch_sdpa"),
    "sm_100": ("flashinfer", "vllm_flash_attn", "triton", "torch_sdpa"),
    "sm_120": ("triton", "flashinfer", "vllm_flash_attn", "torch_sdpa"),
    "cuda": ("triton", "torch_sdpa"),
    **dict.fromkeys(CPU_CLASSES, ("cpu_native", "torch_sdpa")),
}
RUNNERS: Lists = {
    **dict.fromkeys(GPU_CLASSES, ("cuda_graph", "piecewise_cuda_graph", "eager")),
    **dict.fromkeys(CPU_CLASSES, ("cpu_graph", "piecewise_cpu_graph", "eager")),
}
OPS: Lists = {
    **dict.fromkeys(GPU_CLASSES, ("triton", "torch")),
    **dict.fromkeys(CPU_CLASSES, ("cpu_native", "torch")),
}
LINEAR: Lists = {
    **dict.fromkeys(GPU_CLASSES, ("dense", "fp8")),
    **dict.fromkeys(CPU_CLASSES, ("dense_native", "int8", "int4_group", "torch_int8", "dense")),
}
PRIORITIES: dict[CandidateKind, Lists] = {
    "runner": RUNNERS,
    "attention": ATTENTION,
    "ops": OPS,
    "linear": LINEAR,
}
"""Of linear methods counts first what they do to the checkpoint's weights (selection.py)."""


def device_class(hardware: Hardware, device: str) -> str:
    """The list that a device of this node is tried by."""
    return _gpu_class(hardware) if device == "cuda" else _cpu_class(hardware)


def _gpu_class(hardware: Hardware) -> str:
    gpu = first_usable_gpu(hardware)
    major, minor = (gpu.compute_capability if gpu is not None else None) or (0, 0)
    by_major = {8: "sm_80", 9: "sm_90", 10: "sm_100", 11: "sm_100", 12: "sm_120"}
    return "sm_75" if (major, minor) == (7, 5) else by_major.get(major, "cuda")


def _cpu_class(hardware: Hardware) -> str:
    cpu = hardware.cpu
    if cpu.architecture == "aarch64":
        return "cpu_aarch64"
    if cpu.architecture != "x86_64":
        return "cpu"
    for flag, name in (("amx_int8", "cpu_amx"), ("avx512_vnni", "cpu_avx512")):
        if flag in cpu.isa:
            return name
    return "cpu_avx2" if {"avx2", "fma", "f16c"} <= set(cpu.isa) else "cpu"


def is_listed(kind: CandidateKind, name: str, found: str) -> bool:
    """Whether a candidate is on the list of that class."""
    return name in PRIORITIES[kind][found]


def rank(kind: CandidateKind, name: str, found: str) -> int:
    """Its place on the list, the best 0; it must be on it."""
    return PRIORITIES[kind][found].index(name)
