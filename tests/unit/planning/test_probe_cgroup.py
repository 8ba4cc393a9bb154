"""Memory and CPU limits as containers give them."""

from __future__ import annotations

import pytest

from polypath.runtime.planning.probe_cgroup import probe_cpu_quota, probe_memory

GB = 10**9
MEMINFO = "MemTotal: 16000000 kB\nMemFree: 1000000 kB\nMemAvailable: 12000000 kB\n"
HOST, AVAILABLE = 16_000_000 * 1024, 12_000_000 * 1024
V2 = {
    "/proc/meminfo": MEMINFO,
    "/proc/self/cgroup": "0::/pod/box\n",
    "/proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
}
V1 = {
    "/proc/meminfo": MEMINFO,
    "/proc/self/cgroup": "4:memory:/pod/box\n3:cpu,cpuacct:/pod/box\n0::/\n",
    "/proc/self/mountinfo": (
        "31 23 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "32 23 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
    ),
}
BOX2, POD2 = "/sys/fs/cgroup/pod/box", "/sys/fs/cgroup/pod"
BOX1, POD1 = "/sys/fs/cgroup/memory/pod/box", "/sys/fs/cgroup/memory/pod"


def test_without_limits_the_host_counts(write_files) -> None:
    memory = probe_memory(write_files(V2 | {f"{BOX2}/memory.max": "max\n"}))
    assert (memory.total_bytes, memory.free_bytes) == (HOST, AVAILABLE)
    assert "host" in memory.origin


@pytest.mark.parametrize(
    ("files", "origin"),
    [
        (V2 | {f"{BOX2}/memory.max": f"{GB}\n"}, f"v2 memory.max of {BOX2}"),
        (V2 | {f"{POD2}/memory.max": f"{GB}", f"{BOX2}/memory.max": "max"}, f"of {POD2}"),
        (V2 | {f"{BOX2}/memory.high": f"{GB}", f"{BOX2}/memory.max": f"{2 * GB}"}, "memory.high"),
        (V1 | {f"{BOX1}/memory.limit_in_bytes": f"{GB}"}, f"v1 memory.limit_in_bytes of {BOX1}"),
        (
            V1
            | {f"{BOX1}/memory.limit_in_bytes": "9223372036854771712"}
            | {f"{POD1}/memory.limit_in_bytes": f"{GB}"},
            f"of {POD1}",
        ),
        (V1 | {f"{BOX1}/memory.stat": f"hierarchical_memory_limit {GB}\n"}, "hierarchical"),
    ],
    ids=["v2", "v2 parent", "v2 high", "v1", "v1 parent", "v1 hidden parent"],
)
def test_the_smallest_limit_counts_and_names_its_origin(write_files, files, origin) -> None:
    memory = probe_memory(write_files(files))
    assert memory.total_bytes == GB and memory.free_bytes == GB
    assert origin in memory.origin


def test_what_is_in_use_is_not_free_but_droppable_page_cache_is(write_files) -> None:
    files = V2 | {
        f"{BOX2}/memory.max": f"{GB}",
        f"{BOX2}/memory.current": "700000000",
        f"{BOX2}/memory.stat": "anon 1\ninactive_file 300000000\n",
    }
    assert probe_memory(write_files(files)).free_bytes == GB - 400_000_000


def test_what_this_process_holds_is_known(write_files) -> None:
    files = V2 | {"/proc/self/status": "Name:\tx\nVmRSS:\t   2048 kB\n"}
    assert probe_memory(write_files(files)).process_bytes == 2 << 20


def test_a_full_parent_leaves_nothing_free(write_files) -> None:
    files = V2 | {
        f"{BOX2}/memory.max": f"{GB}",
        f"{POD2}/memory.max": f"{2 * GB}",
        f"{POD2}/memory.current": f"{2 * GB + 5}",
    }
    memory = probe_memory(write_files(files))
    assert (memory.total_bytes, memory.free_bytes) == (GB, 0)


@pytest.mark.parametrize("sentinel", ["9223372036854771712", "18446744073709551615", "max", "-1"])
def test_no_sentinel_is_a_limit(write_files, sentinel) -> None:
    files = V1 | {f"{BOX1}/memory.limit_in_bytes": sentinel}
    assert probe_memory(write_files(files)).total_bytes == HOST


def test_a_cgroup_namespace_is_read_at_its_mount(write_files) -> None:
    files = V2 | {"/proc/self/cgroup": "0::/../../elsewhere\n"}
    files |= {"/sys/fs/cgroup/memory.max": f"{GB}\n"}
    assert probe_memory(write_files(files)).total_bytes == GB


def test_a_mount_of_the_group_itself_is_understood(write_files) -> None:
    mount = "30 23 0:26 /pod/box /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    files = V2 | {"/proc/self/mountinfo": mount, "/sys/fs/cgroup/memory.max": f"{GB}\n"}
    assert probe_memory(write_files(files)).total_bytes == GB


def test_nonsense_in_a_limit_is_a_note(write_files) -> None:
    files = write_files(V2 | {f"{BOX2}/memory.max": "plenty\n"})
    assert probe_memory(files).total_bytes == HOST
    assert any("plenty" in note for note in files.notes)


def test_nothing_at_all_is_unknown(write_files) -> None:
    files = write_files({"/etc/motd": ""})
    memory = probe_memory(files)
    assert (memory.total_bytes, memory.free_bytes, memory.origin) == (None, None, "unknown")
    assert any("meminfo" in note for note in files.notes)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        (V2 | {f"{BOX2}/cpu.max": "150000 100000\n"}, 1.5),
        (V2 | {f"{BOX2}/cpu.max": "max 100000\n", f"{POD2}/cpu.max": "400000 100000\n"}, 4.0),
        (
            V1
            | {"/sys/fs/cgroup/cpu/pod/box/cpu.cfs_quota_us": "200000"}
            | {"/sys/fs/cgroup/cpu/pod/box/cpu.cfs_period_us": "100000"},
            2.0,
        ),
    ],
)
def test_the_smallest_cpu_quota_counts(write_files, files, cores) -> None:
    found = probe_cpu_quota(write_files(files))
    assert found is not None and found[0] == cores


def test_no_quota_is_none(write_files) -> None:
    files = V1 | {
        "/sys/fs/cgroup/cpu/pod/box/cpu.cfs_quota_us": "-1",
        "/sys/fs/cgroup/cpu/pod/box/cpu.cfs_period_us": "100000",
    }
    assert probe_cpu_quota(write_files(files)) is None
