"""Rotary settings of a GGUF file: its scaling keys, and Llama 3's factors, which it keeps as a
tensor.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from ..config import RopeConfig
from ..errors import ModelError
from .config_values import ConfigValues
from .gguf_file import GgufFile
from .rope import DEFAULT_THETA, SUPPORTED

FACTORS = "rope_freqs.weight"  # one divisor a frequency
LOW, HIGH = 1.0, 4.0  # Llama 3's factors; every published model has them
ORIGINALS = tuple(1 << n for n in range(8, 21))  # original context lengths that are tried
TOLERANCE = 1e-3


def read_gguf_rope(file: GgufFile, values: ConfigValues, arch: str, head_dim: int) -> RopeConfig:
    """The settings. Raises ModelError for scalings that we do not compute, by name."""
    theta = values.number(f"{arch}.rope.freq_base", DEFAULT_THETA)
    for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
        if name in file.tensors:
            raise ModelError(
                f"{file.path}: rotary scaling 'longrope' is not supported; {SUPPORTED} are."
            )
    scaling = _keys(values, arch, theta)
    if FACTORS not in file.tensors:
        return scaling
    factors = _factors(file, head_dim)
    if all(factor == 1.0 for factor in factors):
        return scaling
    if scaling.scaling != "none":
        raise ModelError(f"{file.path} scales positions twice: {scaling.scaling}, and {FACTORS}.")
    return _llama3(file, values, arch, theta, factors)


def llama3_factors(rope: RopeConfig, head_dim: int) -> list[float]:
    """What each frequency is divided by under Llama 3's rule, as llama.cpp writes it."""
    low_wavelen = rope.original_max_position / rope.low_freq_factor
    high_wavelen = rope.original_max_position / rope.high_freq_factor
    span = rope.high_freq_factor - rope.low_freq_factor
    factors = []
    for index in range(head_dim // 2):
        wavelen = 2 * math.pi * rope.theta ** (2 * index / head_dim)
        smooth = (rope.original_max_position / wavelen - rope.low_freq_factor) / span
        if wavelen < high_wavelen:
            factors.append(1.0)
        elif wavelen > low_wavelen:
            factors.append(rope.factor)
        else:
            factors.append(1 / ((1 - smooth) / rope.factor + smooth))
    return factors


def _keys(values: ConfigValues, arch: str, theta: float) -> RopeConfig:
    kind = values.get(f"{arch}.rope.scaling.type")
    legacy = values.number(f"{arch}.rope.scale_linear", 1.0)
    factor = values.number(f"{arch}.rope.scaling.factor", legacy)
    if kind is None:
        kind = "linear" if factor != 1.0 else "none"
    if kind == "none":
        return RopeConfig(theta=theta)
    if kind != "linear":
        raise ModelError(
            f"{values.file}: rotary scaling {kind!r} is not supported; {SUPPORTED} are."
        )
    if factor < 1.0:
        raise ModelError(
            f"{values.file}: the rotary scaling factor is {factor:g}; it must be at least 1."
        )
    return RopeConfig(theta=theta, scaling="linear", factor=factor)


def _factors(file: GgufFile, head_dim: int) -> Sequence[float]:
    tensor = file.tensors[FACTORS]
    if tensor.type != "F32" or tensor.shape != (head_dim // 2,):
        raise ModelError(
            f"{file.path}: {FACTORS} is {tensor.type} {list(tensor.shape)}; F32 [{head_dim // 2}] "
            "is expected."
        )
    return struct.unpack(f"<{head_dim // 2}f", file.bytes_of(tensor))


def _llama3(
    file: GgufFile, values: ConfigValues, arch: str, theta: float, factors: Sequence[float]
) -> RopeConfig:
    """The Llama 3 setting that gives these factors; the file does not say it in words."""
    known = values.get(f"{arch}.rope.scaling.original_context_length")
    for original in (known,) if isinstance(known, int) and known > 0 else ORIGINALS:
        rope = RopeConfig(
            theta=theta,
            scaling="llama3",
            factor=round(max(factors), 4),  # they are stored as float32
            low_freq_factor=LOW,
            high_freq_factor=HIGH,
            original_max_position=original,
        )
        wanted = llama3_factors(rope, 2 * len(factors))
        if all(math.isclose(a, b, rel_tol=TOLERANCE) for a, b in zip(factors, wanted, strict=True)):
            return rope
    raise ModelError(
        f"{file.path}: the frequencies in {FACTORS} follow no rule that is supported ({SUPPORTED} "
        "are)."
    )
