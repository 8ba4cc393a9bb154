"""Processor facts from faked /proc and /sys."""

from __future__ import annotations

import pytest

from polypath.runtime.planning.probe import probe
from polypath.runtime.planning.probe_cpu import probe_cpu, probe_numa
from polypath.runtime.planning.probe_files import FactFiles, parse_cpu_list

CPU = "processor\t: {0}\nmodel name\t: Some  CPU\nflags\t\t: fpu avx avx2 {1}\n\n"
NODE = "/sys/devices/system/node"


def cpuinfo(*flags: str) -> dict[str, str]:
    return {"/proc/cpuinfo": "".join(CPU.format(i, f) for i, f in enumerate(flags))}


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0-2,5\n", (0, 1, 2, 5)), ("", ()), ("0,2", (0, 2)), ("3", (3,)), ("0-1,1-2", (0, 1, 2))],
)
def test_reads_lists_of_processors(text, numbers) -> None:
    assert parse_cpu_list(text) == numbers


def test_only_flags_that_every_processor_has_count(write_files) -> None:
    cpu = probe_cpu(write_files(cpuinfo("fma f16c", "fma")))
    assert cpu.isa == ("avx", "avx2", "fma")
    assert (cpu.name, cpu.cores_total) == ("Some CPU", 2)


def test_arm_features_are_flags_too(write_files) -> None:
    cpu = probe_cpu(write_files({"/proc/cpuinfo": "processor : 0\nFeatures : fp asimd sve bf16\n"}))
    assert cpu.isa == ("asimd", "bf16", "sve")


def test_affinity_limits_the_cores(write_files) -> None:
    status = {"/proc/self/status": "Name:\tx\nCpus_allowed_list:\t0,2\n"}
    cpu = probe_cpu(write_files(cpuinfo("", "", "", "") | status))
    assert (cpu.cores_usable, cpu.cores_total) == (2, 4)
    assert "affinity" in cpu.cores_origin


def test_half_a_core_is_one_core(write_files) -> None:
    files = cpuinfo("", "") | {
        "/proc/self/cgroup": "0::/\n",
        "/proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        "/sys/fs/cgroup/cpu.max": "50000 100000\n",
    }
    cpu = probe_cpu(write_files(files))
    assert cpu.cores_usable == 1 and "cpu.max" in cpu.cores_origin


def test_numa_nodes_may_lack_memory_or_processors(write_files) -> None:
    nodes = probe_numa(
        write_files(
            {
                f"{NODE}/node0/cpulist": "0,2\n",
                f"{NODE}/node0/meminfo": "Node 0 MemTotal: 1024 kB\n",
                f"{NODE}/node1/cpulist": "\n",
                f"{NODE}/node1/meminfo": "Node 1 MemTotal: 0 kB\n",
                f"{NODE}/node2/cpulist": "1\n",
            }
        )
    )
    assert nodes is not None
    assert [(n.id, n.cpus, n.memory_bytes) for n in nodes] == [
        (0, (0, 2), 1024 * 1024),
        (1, (), 0),
        (2, (1,), None),
    ]


@pytest.mark.parametrize("files", [{}, {f"{NODE}/online": "0\n"}])
def test_hidden_numa_is_unknown_and_noted(write_files, files) -> None:
    reader = write_files({"/etc/motd": ""} | files)
    assert probe_numa(reader) is None
    assert any("NUMA" in note for note in reader.notes)


def test_a_forbidden_file_is_a_note(tmp_path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").mkdir()  # reading a folder fails whoever runs the tests
    files = FactFiles(tmp_path)
    assert probe_cpu(files).isa == ()
    assert any("/proc/cpuinfo could not be read" in note for note in files.notes)


def test_probe_survives_an_empty_machine(tmp_path) -> None:
    hardware = probe(root=tmp_path, environ={"PATH": ""})
    assert hardware.cpu.cores_usable >= 1
    assert hardware.memory.total_bytes is None and hardware.numa is None
    assert hardware.compiler.problem is not None and hardware.notes
