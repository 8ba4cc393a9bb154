"""The builds of the native CPU kernels: which exist, which are installed, which a CPU can run.
Loads none.
"""

from __future__ import annotations

import importlib.machinery
from collections.abc import Collection
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PORTABLE = "portable"
VARIANTS = (
    (
        "avx512",
        frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni"}),
    ),
    ("avx2", frozenset({"avx2", "fma", "f16c"})),
    (PORTABLE, frozenset[str]()),
)
"""Name and needed CPU flags (as /proc/cpuinfo spells them) of each build, fastest first."""


def built_variants() -> tuple[str, ...]:
    """Variants whose library lies beside this file, fastest first."""
    return tuple(name for name, _ in VARIANTS if library_file(name) is not None)


def fitting_variants(flags: Collection[str]) -> tuple[str, ...]:
    """Variants that a CPU with these flags can run, fastest first; the portable one always."""
    return tuple(name for name, needed in VARIANTS if needed <= set(flags))


def library_file(variant: str) -> Path | None:
    """The library of a variant, or None when it was not built."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = FOLDER / f"_{variant}{suffix}"
        if path.is_file():
            return path
    return None
