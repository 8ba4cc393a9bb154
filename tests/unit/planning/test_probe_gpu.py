"""Cards and drivers with NVML faked, broken or missing."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from polypath.runtime.planning.probe_gpu import probe_gpus


class NVMLError(Exception):
    """Stands for pynvml's."""


class FakeNvml(ModuleType):
    """As much of pynvml as the probe calls. `broken`: names of functions that fail."""

    NVMLError = NVMLError

    def __init__(self, num_cards: int = 1, broken: tuple[str, ...] = ()) -> None:
        super().__init__("pynvml")
        self._num_cards, self._broken = num_cards, broken
        self.shut_down = 0

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlSystemGetCudaDriverVersion_v2": 12080,
            "nvmlSystemGetDriverVersion": b"570.1",
            "nvmlDeviceGetCount": self._num_cards,
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=100, free=60),
            "nvmlDeviceGetCudaComputeCapability": (9, 0),
            "nvmlDeviceGetName": "Card",
        }

        def call(*arguments: Any) -> Any:
            if name in self._broken:
                raise NVMLError("Driver/library version mismatch")
            if name == "nvmlShutdown":
                self.shut_down += 1
            if name == "nvmlDeviceGetHandleByIndex":
                return arguments[0]
            return f"GPU-{arguments[0]}a" if name == "nvmlDeviceGetUUID" else answers.get(name)

        if name.startswith("nvml"):
            return call
        raise AttributeError(name)


def look(files, nvml: FakeNvml, **environ: str):
    return probe_gpus(files, {"PATH": ""} | environ, lambda: nvml)


def test_reads_driver_and_cards(write_files) -> None:
    nvml = FakeNvml(2)
    driver, gpus = look(write_files({}), nvml)
    assert (driver.version, driver.cuda_version, driver.problem) == ("570.1", (12, 8), None)
    assert [gpu.index for gpu in gpus] == [0, 1]
    assert (gpus[0].total_bytes, gpus[0].free_bytes) == (100, 60)
    assert gpus[0].compute_capability == (9, 0) and gpus[0].problem is None
    assert nvml.shut_down == 1


def test_a_lost_card_does_not_hide_the_driver(write_files) -> None:
    driver, gpus = look(write_files({}), FakeNvml(1, ("nvmlDeviceGetMemoryInfo",)))
    assert driver.version == "570.1"
    assert gpus[0].problem is not None and "mismatch" in gpus[0].problem


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlSystemGetDriverVersion", "nvmlDeviceGetCount"])
def test_a_broken_driver_is_a_fact(write_files, broken) -> None:
    driver, gpus = look(write_files({"/dev/null0": ""}), FakeNvml(1, (broken,)))
    assert gpus == () and driver.problem is not None and "mismatch" in driver.problem


@pytest.mark.parametrize(
    "files",
    [
        {"/dev/nvidia0": "", "/dev/nvidiactl": ""},
        {
            "/sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n",
            "/sys/bus/pci/devices/0000:01:00.0/class": "0x030200\n",
        },
    ],
)
def test_a_card_that_nvml_cannot_reach_is_there_and_unusable(write_files, files) -> None:
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue\n"
    files |= {"/proc/driver/nvidia/version": version}
    driver, gpus = look(write_files(files), FakeNvml(1, ("nvmlInit",)))
    assert len(gpus) == 1 and gpus[0].problem is not None and "mismatch" in gpus[0].problem
    assert driver.version == "535.54.03"


def fake_smi(folder: Path, text: str, status: int) -> str:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\necho '{text}'\nexit {status}\n")
    path.chmod(0o755)
    return str(folder)


def test_what_nvidia_smi_complains_about_is_the_reason(write_files, tmp_path) -> None:
    path = fake_smi(tmp_path, "Driver/library version mismatch", 18)
    _, gpus = look(write_files({}), FakeNvml(1, ("nvmlInit",)), PATH=path)
    assert len(gpus) == 1 and gpus[0].problem is not None
    assert "nvidia-smi exited 18: Driver/library version mismatch" in gpus[0].problem


def test_nvidia_smi_that_sees_no_devices_is_no_card(write_files, tmp_path) -> None:
    path = fake_smi(tmp_path, "No devices were found", 6)
    driver, gpus = look(write_files({}), FakeNvml(1, ("nvmlInit",)), PATH=path)
    assert gpus == () and driver.problem is not None


def test_without_nvidia_ml_py_the_reason_is_recorded(write_files) -> None:
    def fail() -> ModuleType:
        raise ImportError("No module named 'pynvml'")

    driver, gpus = probe_gpus(write_files({}), {"PATH": ""}, fail)
    assert gpus == () and driver.problem is not None and "nvidia-ml-py" in driver.problem


@pytest.mark.parametrize(
    ("visible", "usable", "hidden"),
    [
        *(("1", [1], [0]), ("1,0", [1, 0], []), ("", [], [0, 1])),
        *(("-1", [], [0, 1]), ("GPU-1", [1], [0]), ("0,7,1", [0], [1])),
    ],
)
def test_hidden_cards_come_last_with_the_reason(write_files, visible, usable, hidden) -> None:
    _, gpus = look(write_files({}), FakeNvml(2), CUDA_VISIBLE_DEVICES=visible)
    assert [g.index for g in gpus if g.problem is None] == usable
    assert [g.index for g in gpus if g.problem] == hidden
    assert [g.index for g in gpus] == usable + hidden


def test_an_amd_accelerator_is_seen_and_the_graphics_of_a_desktop_are_not(write_files) -> None:
    base = "/sys/bus/pci/devices"
    files = write_files(
        {
            f"{base}/0000:05:00.0/vendor": "0x1002\n",
            f"{base}/0000:05:00.0/class": "0x120000\n",
            f"{base}/0000:0c:00.0/vendor": "0x1002\n",
            f"{base}/0000:0c:00.0/class": "0x030000\n",
        }
    )
    _, gpus = look(files, FakeNvml(1, ("nvmlInit",)))
    assert [(gpu.vendor, gpu.name) for gpu in gpus] == [
        ("amd", "AMD accelerator (PCI 0000:05:00.0)")
    ]
