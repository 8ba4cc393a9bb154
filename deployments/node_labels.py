"""Labels by which a node describes itself to Ray: on-prem clusters cannot give them in a file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..runtime.planning.hardware import Hardware

ISA_LEVELS = (  # best first: the name, and the flags that it takes
    ("amx", ("amx_tile", "amx_bf16")),
    ("avx512-vnni", ("avx512f", "avx512_vnni")),
    ("avx512", ("avx512f", "avx512bw")),
    ("avx2", ("avx2", "fma", "f16c")),
    ("sve", ("sve",)),
    ("neon", ("asimd",)),
)


def node_labels(hardware: Hardware) -> dict[str, str]:
    """What pools select by: `device`, `arch`, `isa`, `cores`, `memory-gib`, and of the first card
    that can be used `gpu`, `gpu-arch`, `gpu-memory-gib`. A card that cannot be used is no label.
    """
    flags = set(hardware.cpu.isa)
    usable = [gpu for gpu in hardware.gpus if gpu.problem is None]
    isa = next((name for name, needed in ISA_LEVELS if flags.issuperset(needed)), "plain")
    labels = {
        "device": "cuda" if usable else "cpu",
        "arch": hardware.cpu.architecture,
        "isa": isa,
        "cores": str(hardware.cpu.cores_usable),
        "memory-gib": _gib(hardware.memory.total_bytes),
    }
    if usable:
        card = usable[0]
        level = "".join(map(str, card.compute_capability or ()))
        labels |= {
            "gpu": card.name,
            "gpu-arch": f"sm{level}" if level else "",
            "gpu-memory-gib": _gib(card.total_bytes),
        }
    spelt = {name: label_value(value) for name, value in labels.items()}
    return {name: value for name, value in spelt.items() if value}


def label_value(text: str) -> str:
    """The text as a value that Ray takes: letters, digits, `-`, `_` and `.`, at most 63; may be
    empty.
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:63].strip("-_.")


def as_option(labels: dict[str, str]) -> str:
    """For `ray start --labels`."""
    return ",".join(f"{name}={value}" for name, value in labels.items())


def _gib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else str(round(num_bytes / (1 << 30)))
