"""The processor: name, usable cores, instruction sets in the kernel's view, NUMA nodes."""

from __future__ import annotations

import os
import platform
import re

from .hardware import Cpu, NumaNode
from .probe_cgroup import probe_cpu_quota
from .probe_files import FactFiles, parse_cpu_list

ISA = frozenset(
    (
        *("sse4_2", "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512cd"),
        *("avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
        *("amx_tile", "amx_int8", "amx_bf16"),
        *("asimd", "asimdhp", "asimddp", "fphp", "bf16", "i8mm", "sve", "sve2"),
    )
)
"""Flags that kernels choose by. Those the kernel masks are absent in /proc/cpuinfo, and so here."""


def probe_cpu(files: FactFiles) -> Cpu:
    """Facts about the processor; unknown ones become notes in `files`."""
    text = (
        files.read("/proc/cpuinfo", missing="instruction sets of the processor are unknown") or ""
    )
    usable, total, origin = _cores(files, text)
    return Cpu(
        name=_name(text),
        architecture=platform.machine() or "unknown",
        cores_total=total,
        cores_usable=usable,
        cores_origin=origin,
        isa=_isa(text),
    )


def _name(cpuinfo: str) -> str:
    match = re.search(r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return " ".join(match[1].split()) if match else platform.processor() or "unknown processor"


def _isa(cpuinfo: str) -> tuple[str, ...]:
    """Flags that every processor has: a thread may run on any of them."""
    lines = re.findall(r"^(?:flags|Features)\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    common = (
        frozenset.intersection(*(frozenset(line.split()) for line in lines))
        if lines
        else frozenset()
    )
    return tuple(sorted(common & ISA))


def _cores(files: FactFiles, cpuinfo: str) -> tuple[int, int, str]:
    """(usable, of the host, what made it so): the least of host, affinity and quota."""
    total = len(re.findall(r"^processor\s*:", cpuinfo, re.MULTILINE)) or os.cpu_count() or 1
    choices = [(float(total), "all cores of the host")]
    allowed = _affinity(files)
    if allowed is not None and allowed < total:
        choices.append((float(allowed), "CPU affinity (Cpus_allowed_list)"))
    quota = probe_cpu_quota(files)
    if quota is not None:
        choices.append(quota)
    cores, origin = min(choices)
    return max(1, int(cores)), total, origin


def _affinity(files: FactFiles) -> int | None:
    """How many processors this process may run on."""
    text = files.read("/proc/self/status") or ""
    match = re.search(r"^Cpus_allowed_list:\s*(\S+)", text, re.MULTILINE)
    if match:
        numbers = files.parse("Cpus_allowed_list", match[1], parse_cpu_list)
        return len(numbers) if numbers else None
    if str(files.root) == "/" and hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return None


def probe_numa(files: FactFiles) -> tuple[NumaNode, ...] | None:
    """NUMA nodes, with or without CPUs and memory; None where the topology is hidden."""
    base = "/sys/devices/system/node"
    ids = [int(n[4:]) for n in files.names(base) or [] if re.fullmatch(r"node\d+", n)]
    if not ids:
        files.note(f"NUMA topology is unknown: {base} shows no nodes")
        return None
    return tuple(_numa_node(files, f"{base}/node{i}", i) for i in sorted(ids))


def _numa_node(files: FactFiles, base: str, node: int) -> NumaNode:
    cpus = files.parse(f"{base}/cpulist", files.read(f"{base}/cpulist"), parse_cpu_list)
    match = re.search(r"MemTotal:\s*(\d+)\s*kB", files.read(f"{base}/meminfo") or "")
    return NumaNode(id=node, cpus=cpus or (), memory_bytes=int(match[1]) * 1024 if match else None)
