"""How many bits a weight takes: what checkpoints hold, what `--quantization` allows, what the
methods make of it.

`--quantization` says at most how many bits a weight may have, `--linear-method` who stores and
multiplies it. A weight that has fewer bits already stays as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config import EngineConfig, ModelConfig

if TYPE_CHECKING:
    from .capability import Capability
    from .rule import Verdict
    from .situation import Situation

WIDTHS = {"int8": 8, "int4": 4}
"""What `--quantization` may ask, in bits; the wider first."""
AS_STORED = "stored"
"""What a plan says where no weight is rounded beyond what its storage asks."""

STORED_BITS = {
    "float32": 32,
    "bfloat16": 16,
    "float16": 16,
    "Q8_0": 8,
    "Q6_K": 6,
    "Q5_K": 5,
    "Q5_1": 5,
    "Q5_0": 5,
    "Q4_K": 4,
    "Q4_1": 4,
    "Q4_0": 4,
}
"""Bits of a weight in each type that checkpoints may have, without its share of the scales."""

NATIVE_BYTES = {
    "Q4_0": (18, 18),
    "Q4_1": (20, 20),
    "Q5_0": (34, 22),
    "Q5_1": (34, 24),
    "Q8_0": (34, 34),
    "Q4_K": (160, 144),
    "Q5_K": (272, 176),
    "Q6_K": (272, 210),
}
"""Bytes of a block in our kernels' storage, and in the file."""

BYTES_OF_32 = {"int4": 20, "int8": 34}
"""32 weights with their scales in our kernels."""

REPACKED = {
    "Q4_K": "4-bit values stay as they are and the scale and offset of each group of 32, 6 bits in "
    "the file, become half-precision numbers (int4_group)",
    "Q5_1": "rounded to 8 bits in groups of 32 (int8)",
    "Q5_K": "rounded to 8 bits in groups of 32 (int8)",
    "Q6_K": "rounded to 8 bits in groups of 32, at a quarter of the larger of two scales (int8)",
}
"""What the native kernels make of types that they do not read."""

ROUNDED = {
    "int4_group": "4 bits in groups of 32 with a scale and an offset each",
    "int8": "8 bits in groups of 32",
    "torch_int8": "8 bits with one scale for each output",
}
ACTIVATIONS = {
    "int4_group": "activations are rounded to 8 bits in groups of 32",
    "int8": "activations are rounded to 8 bits in groups of 32",
    "torch_int8": "activations are rounded to two numbers of 7 bits, scaled token by token",
}
"""What methods of integers do."""


def stored_types(model: ModelConfig) -> tuple[tuple[str, int], ...]:
    """(type, bytes) of the checkpoint's weights, most bytes first."""
    return model.stored_types or ((model.stored_dtype, model.weight_bytes),)


def holds(capability: Capability, stored_dtype: str) -> bool:
    """Whether a method keeps weights of that type, or repacks them with next to nothing lost."""
    return stored_dtype in (*capability.keeps_stored, *capability.repacks)


def weight_width(config: EngineConfig, capability: Capability, model: ModelConfig) -> str:
    """What weights are rounded to: as asked, or as the named method must, else as they are."""
    if config.quantization != "auto":
        return config.quantization
    rounds, stored = capability.quantizes, model.stored_dtype
    if not rounds or holds(capability, stored):
        return AS_STORED
    has_fewer = STORED_BITS[stored] < WIDTHS[rounds[0]]
    return AS_STORED if capability.native_kernels and has_fewer else rounds[0]


def why_not_width(capability: Capability, situation: Situation) -> Verdict | None:
    """A rule: why a linear method does not give the bits that were asked for."""
    asked, stored = situation.quantization, situation.model.stored_dtype
    if capability.kind != "linear" or asked == "auto" or asked in capability.quantizes:
        return None
    if holds(capability, stored) and STORED_BITS[stored] <= WIDTHS[asked]:
        return None
    own = capability.quantizes[0] if capability.quantizes else None
    does = (
        f"rounds weights to {WIDTHS[own]} bits"
        if own is not None
        else f"stores {stored} weights without rounding them"
    )
    return (
        f"{capability.name} {does}; --quantization {asked} asks for {WIDTHS[asked]} bits",
        f"--quantization {own or 'auto'}, or another --linear-method",
    )


def weights_bytes(model: ModelConfig, method: Capability, width: str, itemsize: int) -> int:
    """Bytes of all weights as the method stores them; `itemsize` of the plan's dtype."""
    embedding = model.vocab_size * model.hidden_size
    if method.name == "torch_int8":  # a tied embedding is looked up and multiplied: two copies
        return model.num_parameters + (embedding if model.tie_word_embeddings else 0)
    types = stored_types(model)
    is_kept = width == AS_STORED or all(STORED_BITS[t] <= WIDTHS[width] for t, _ in types)
    if not method.native_kernels or (is_kept and not model.weight_bytes):
        return model.num_parameters * itemsize
    if is_kept:
        rest = model.weight_bytes - sum(size for _, size in types)  # norms and biases
        return rest + sum(_kept_bytes(method, stored, size) for stored, size in types)
    embeddings = embedding * (1 if model.tie_word_embeddings else 2)
    rest = model.num_parameters - embeddings
    return (embeddings * BYTES_OF_32["int8"] + rest * BYTES_OF_32[width]) // 32


def _kept_bytes(method: Capability, stored: str, num_bytes: int) -> int:
    """Bytes in memory of weights that take `num_bytes` in the file."""
    if stored not in NATIVE_BYTES:
        return num_bytes
    ours, theirs = NATIVE_BYTES[stored]
    if not method.quantizes:  # it stores floats only: widened to float32
        ours = 4 * (256 if stored.endswith("_K") else 32)
    return num_bytes * ours // theirs


def weight_notes(model: ModelConfig, method: str, width: str) -> list[str]:
    """What becomes of weights and activations in a method of integers, type by type."""
    notes = []
    for stored, _ in stored_types(model):
        if width in WIDTHS and (STORED_BITS[stored] > WIDTHS[width] or method == "torch_int8"):
            notes.append(f"{stored} weights of {_rounded(model, method, width)}, as asked")
        elif stored in REPACKED:
            notes.append(
                f"{stored} weights are repacked, as no kernel reads them: {REPACKED[stored]}"
            )
        elif stored in NATIVE_BYTES:
            notes.append(f"{stored} weights run as they are stored")
    return [*notes, ACTIVATIONS[method]]


def _rounded(model: ModelConfig, method: str, width: str) -> str:
    outer = "the embedding" if model.tie_word_embeddings else "embedding and output layer"
    if width == "int4":
        return f"linear layers are rounded to {ROUNDED[method]}, {outer} to {ROUNDED['int8']}"
    return f"linear layers and {outer} are rounded to {ROUNDED[method]}"
