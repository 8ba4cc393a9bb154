"""Looking at this node: `probe()` gathers one `Hardware`; a fact it cannot get is no failure."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from ...kernels.cpu.variants import built_variants
from .hardware import Cpu, Gpu, Hardware, Memory, Torch
from .probe_cgroup import probe_memory
from .probe_cpu import probe_cpu, probe_numa
from .probe_files import FactFiles
from .probe_gpu import probe_gpus
from .probe_software import (
    OPTIONAL_PACKAGES,
    OptionalPackage,
    probe_compiler,
    probe_nvcc,
    probe_packages,
    probe_torch,
)


def probe(
    root: Path = Path("/"),
    environ: Mapping[str, str] | None = None,
    load_nvml: Callable[[], ModuleType] | None = None,
) -> Hardware:
    """Facts about this node. Tests give a `root` with faked /proc and /sys, and a faked NVML."""
    environ = os.environ if environ is None else environ
    files = FactFiles(root)
    cpu = probe_cpu(files)
    memory = probe_memory(files)
    numa = probe_numa(files)
    driver, gpus = probe_gpus(files, environ, load_nvml)
    torch = probe_torch()
    return Hardware(
        name=_name(cpu, memory, gpus),
        origin="probe",
        software=_software(torch),
        cpu=cpu,
        memory=memory,
        torch=torch,
        driver=driver,
        gpus=gpus,
        numa=numa,
        python=platform.python_version(),
        packages=probe_packages(OPTIONAL_PACKAGES if gpus else _not_tried()),
        compiler=probe_compiler(environ),
        nvcc=probe_nvcc(environ) if gpus else None,
        native_kernels=built_variants(),
        notes=tuple(files.notes),
    )


def _not_tried() -> tuple[OptionalPackage, ...]:
    """The same packages, none imported: those that are tried serve GPUs, and without a card half a
    second of each start would go into them.
    """
    return tuple(replace(package, tried=False) for package in OPTIONAL_PACKAGES)


def _name(cpu: Cpu, memory: Memory, gpus: tuple[Gpu, ...]) -> str:
    """One line for people: cards if there are any, processor, cores and memory."""
    size = "memory unknown"
    if memory.total_bytes is not None:
        size = f"{memory.total_bytes / 2**30:.1f} GiB"
    host = f"{cpu.name}, {cpu.cores_usable} cores, {size}"
    return f"{len(gpus)} x {gpus[0].name}; {host}" if gpus else host


def _software(torch: Torch) -> str:
    system = f"{platform.system()} {platform.machine()}"
    return f"{system}, Python {platform.python_version()}, torch {torch.version or 'missing'}"
