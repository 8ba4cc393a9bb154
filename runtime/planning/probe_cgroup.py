"""Memory and CPU as the container gives them: the host against every cgroup (v1, v2) above us."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from .hardware import Memory
from .probe_files import FactFiles

UNLIMITED = (
    1 << 60
)  # v1 writes 2**63 rounded down to a page, some kernels less: no machine has an EiB


@dataclass(frozen=True, kw_only=True, slots=True)
class CgroupFolder:
    """One level of the hierarchy that holds this process, for one controller."""

    path: str  # in the file system
    version: int


def cgroup_folders(files: FactFiles, controller: str) -> list[CgroupFolder]:
    """Folders from this process's group up to its mount point: v1 of that controller, and v2."""
    groups = _own_groups(files)
    folders: list[CgroupFolder] = []
    for version, mount_root, mount_point, controllers in _mounts(files):
        if version == 1 and controller not in controllers:
            continue
        group = groups.get(controller if version == 1 else "")
        if group is None:
            continue
        below = _below(group, mount_root)
        for depth in range(len(below), -1, -1):
            path = str(PurePosixPath(mount_point, *below[:depth]))
            if files.path(path).is_dir():
                folders.append(CgroupFolder(path=path, version=version))
    return folders


def _own_groups(files: FactFiles) -> dict[str, str]:
    """Group of this process: by controller for v1, under "" for v2."""
    groups: dict[str, str] = {}
    text = files.read("/proc/self/cgroup", missing="limits of a container are unknown")
    for line in (text or "").splitlines():
        _, names, group = line.split(":", 2) if line.count(":") >= 2 else ("", "?", "")
        for name in names.split(","):
            groups[name] = group
    return groups


def _mounts(files: FactFiles) -> list[tuple[int, str, str, list[str]]]:
    """(version, root inside the hierarchy, mount point, controllers) of each cgroup mount."""
    found = []
    for line in (files.read("/proc/self/mountinfo") or "").splitlines():
        front, _, back = line.partition(" - ")
        fields, kind = front.split(), back.split()
        if len(fields) < 5 or len(kind) < 3 or not kind[0].startswith("cgroup"):
            continue
        version = 2 if kind[0] == "cgroup2" else 1
        found.append((version, fields[3], fields[4], kind[2].split(",")))
    return found


def _below(group: str, mount_root: str) -> tuple[str, ...]:
    """Parts of `group` under the mount; none where the namespace hides them."""
    path = PurePosixPath("/", group.lstrip("/"))
    if ".." in path.parts:
        return ()
    try:
        return path.relative_to(mount_root).parts
    except ValueError:
        return ()


def probe_memory(files: FactFiles) -> Memory:
    """Host memory or the tightest limit above us, and what of it is free (swap never counts)."""
    host_total, host_free = _host_memory(files)
    total, free, origin = host_total, host_free, "host memory (/proc/meminfo)"
    for limit, used, where in _memory_limits(files):
        if total is None or limit < total:
            total, origin = limit, where
        free = max(0, limit - used) if free is None else min(free, max(0, limit - used))
    if total is None:
        origin = "unknown"
    process = _resident(files)
    return Memory(total_bytes=total, free_bytes=free, origin=origin, process_bytes=process)


def _resident(files: FactFiles) -> int:
    match = re.search(r"^VmRSS:\s*(\d+) kB", files.read("/proc/self/status") or "", re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def _host_memory(files: FactFiles) -> tuple[int | None, int | None]:
    text = files.read("/proc/meminfo", missing="memory of the host is unknown")
    fields = {}
    for line in (text or "").splitlines():
        name, _, rest = line.partition(":")
        if rest.split() and rest.split()[0].isdigit():
            fields[name] = int(rest.split()[0]) * 1024
    if "MemTotal" in fields:
        return fields["MemTotal"], fields.get("MemAvailable", fields.get("MemFree"))
    if str(files.root) != "/":
        return None, None
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page


def _memory_limits(files: FactFiles) -> list[tuple[int, int, str]]:
    """(limit, bytes in use that cannot be reclaimed, where it says so) of each limited group."""
    found = []
    for folder in cgroup_folders(files, "memory"):
        stat = _stat(files, folder)
        used = _used(files, folder, stat)
        for name, limit in _limits_of(files, folder, stat):
            if limit is not None and 0 < limit < UNLIMITED:
                found.append((limit, used, f"cgroup v{folder.version} {name} of {folder.path}"))
    return found


def _limits_of(
    files: FactFiles, folder: CgroupFolder, stat: dict[str, int]
) -> list[tuple[str, int | None]]:
    if folder.version == 2:
        return [(n, files.read_int(f"{folder.path}/{n}")) for n in ("memory.max", "memory.high")]
    name = "memory.limit_in_bytes"
    parents = "hierarchical_memory_limit"  # known even where a namespace hides the parents
    return [(name, files.read_int(f"{folder.path}/{name}")), (parents, stat.get(parents))]


def _used(files: FactFiles, folder: CgroupFolder, stat: dict[str, int]) -> int:
    """Bytes in use without the page cache that is dropped first (kubelet's working set)."""
    name = "memory.current" if folder.version == 2 else "memory.usage_in_bytes"
    cache = stat.get("inactive_file" if folder.version == 2 else "total_inactive_file", 0)
    return max(0, (files.read_int(f"{folder.path}/{name}") or 0) - cache)


def _stat(files: FactFiles, folder: CgroupFolder) -> dict[str, int]:
    fields = {}
    for line in (files.read(f"{folder.path}/memory.stat") or "").splitlines():
        name, _, number = line.partition(" ")
        if number.strip().isdigit():
            fields[name] = int(number)
    return fields


def probe_cpu_quota(files: FactFiles) -> tuple[float, str] | None:
    """The smallest CPU quota above this process, in cores, and where it stands; None without."""
    quotas = []
    for folder in cgroup_folders(files, "cpu"):
        name, quota = _quota(files, folder)
        if quota is not None:
            quotas.append((quota, f"cgroup v{folder.version} {name} of {folder.path}"))
    return min(quotas, default=None)


def _quota(files: FactFiles, folder: CgroupFolder) -> tuple[str, float | None]:
    if folder.version == 2:
        name = "cpu.max"
        text = files.read(f"{folder.path}/{name}")
        parts = (text or "").split()
        if len(parts) != 2 or parts[0] == "max":
            return name, None
        return name, files.parse(
            name, text, lambda t: int(t.split()[0]) / max(1, int(t.split()[1]))
        )
    name = "cpu.cfs_quota_us"
    quota = files.read_int(f"{folder.path}/{name}")
    period = files.read_int(f"{folder.path}/cpu.cfs_period_us")
    return name, quota / period if quota and period and quota > 0 and period > 0 else None
