"""Which number types "auto" tries, best first, and what an explicit one costs."""

from __future__ import annotations

from ..config import EngineConfig, ModelConfig
from .capability import ALL_DTYPES
from .device import first_usable_gpu
from .hardware import Hardware
from .memory import ITEMSIZE, gigabytes
from .quantization import ACTIVATIONS
from .refusal import Refusal
from .rule import Verdict, ask_all, rule

NATIVE_FLAGS = {
    "bfloat16": ("avx512_bf16", "amx_bf16", "bf16"),
    "float16": ("avx512_fp16", "asimdhp"),
}
"""CPU flags of which one makes a type fast."""

SLOWNESS = {"bfloat16": (9, 2.5), "float16": (7, 2)}
"""Times slower than float32: one AVX2 core, torch 2.13, 512 tokens and 1 through 576 x 1536."""


def dtype_candidates(model: ModelConfig, config: EngineConfig, device: str) -> tuple[str, ...]:
    """Types of weights and activations to try, best first: the user's alone where one is named.

    On a CPU float32: half precision crawls on most, and all GGUF weights are dequantized anyway.
    On a card the checkpoint's own type, bfloat16 for quantized ones.
    """
    if config.dtype != "auto":
        return (config.dtype,)
    if device == "cpu":
        return ("float32",)
    first = model.stored_dtype if model.stored_dtype in ALL_DTYPES else "bfloat16"
    return tuple(dict.fromkeys((first, "float16", "float32")))


def why_not_dtype(hardware: Hardware, device: str, dtype: str) -> list[Refusal]:
    """Why a device cannot compute in a type, whatever the candidate."""
    return ask_all(DTYPE_RULES, hardware, device, dtype)


@rule(
    "dtype.compute_capability",
    "unavailable",
    refuses="bfloat16 on a card that has no such arithmetic",
    source="vLLM #15853: a T4 with a model stored as bfloat16",
)
def has_arithmetic(hardware: Hardware, device: str, dtype: str) -> Verdict | None:
    gpu = first_usable_gpu(hardware) if device == "cuda" else None
    if gpu is None or dtype != "bfloat16":
        return None
    found = gpu.compute_capability
    if found is not None and found >= (8, 0):
        return None
    has = f"{found[0]}.{found[1]}" if found is not None else "unknown"
    return (
        f"bfloat16 needs compute capability 8.0; {gpu.name} has {has}",
        "--dtype float16, or a GPU of compute capability 8.0",
    )


DTYPE_RULES = (has_arithmetic,)


def dtype_notes(
    hardware: Hardware, model: ModelConfig, device: str, dtype: str, linear_method: str
) -> list[str]:
    """What a reader of the plan should know about the chosen type."""
    notes = []
    has_floats = linear_method not in ACTIVATIONS  # else quantization.py says what becomes of them
    if has_floats and model.stored_dtype not in ALL_DTYPES:
        loaded = gigabytes(model.num_parameters * ITEMSIZE[dtype])
        notes.append(
            f"{model.stored_dtype} weights ({gigabytes(model.weight_bytes)}) are dequantized to "
            f"{dtype} when they load ({loaded})"
        )
    elif has_floats and model.stored_dtype != dtype:
        notes.append(f"weights are stored as {model.stored_dtype} and computed in {dtype}")
    if device == "cpu" and dtype in NATIVE_FLAGS and not _is_native(hardware, dtype):
        many, one = SLOWNESS[dtype]
        notes.append(
            f"warning: {dtype} is slow on this processor, which has none of "
            f"{', '.join(NATIVE_FLAGS[dtype])}: linear layers were measured {many} times slower "
            f"than float32 on 512 tokens and {one} times on one token (one AVX2 core)"
        )
    return notes


def _is_native(hardware: Hardware, dtype: str) -> bool:
    return any(flag in hardware.cpu.isa for flag in NATIVE_FLAGS[dtype])
