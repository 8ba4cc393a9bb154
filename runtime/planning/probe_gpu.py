"""NVIDIA cards by NVML, without a CUDA context; traces of a card it cannot reach are facts too, and
so are AMD's accelerators, which this version does not use.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

from .hardware import Driver, Gpu
from .probe_files import FactFiles

NVIDIA_SMI_TIMEOUT_S = 10.0


def probe_gpus(
    files: FactFiles,
    environ: Mapping[str, str],
    load_nvml: Callable[[], ModuleType] | None = None,
) -> tuple[Driver, tuple[Gpu, ...]]:
    """The driver and every card, usable or not. Tests give `load_nvml` for `import pynvml`."""
    driver, gpus = _nvidia(files, environ, load_nvml)
    return driver, (*gpus, *_amd_cards(files, len(gpus)))


def _nvidia(
    files: FactFiles, environ: Mapping[str, str], load_nvml: Callable[[], ModuleType] | None
) -> tuple[Driver, tuple[Gpu, ...]]:
    try:
        nvml = load_nvml() if load_nvml is not None else import_module("pynvml")
    except ImportError as error:
        return _without_nvml(files, environ, f"nvidia-ml-py does not import: {error}")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return _without_nvml(files, environ, f"NVML: {error}")
    try:
        driver, gpus = _driver(nvml), _cards(nvml)
    except nvml.NVMLError as error:
        return _without_nvml(files, environ, f"NVML: {error}")
    finally:
        _shut_down(nvml, files)
    return driver, _visible(gpus, environ)


def _shut_down(nvml: Any, files: FactFiles) -> None:  # Any: pynvml has no types
    try:
        nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        files.note(f"NVML did not shut down: {error}")


def _driver(nvml: Any) -> Driver:  # Any: pynvml has no types
    cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
    return Driver(
        version=_text(nvml.nvmlSystemGetDriverVersion()),
        cuda_version=(cuda // 1000, cuda % 1000 // 10),
    )


def _cards(nvml: Any) -> list[tuple[Gpu, str]]:  # Any: pynvml has no types
    """Each card with its UUID."""
    return [_card(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]


def _card(nvml: Any, index: int) -> tuple[Gpu, str]:  # Any: pynvml has no types
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        gpu = Gpu(
            index=index,
            name=_text(nvml.nvmlDeviceGetName(handle)),
            total_bytes=int(memory.total),
            free_bytes=int(memory.free),
            compute_capability=(int(major), int(minor)),
        )
        return gpu, _text(nvml.nvmlDeviceGetUUID(handle))
    except nvml.NVMLError as error:  # one lost card does not hide the others
        return Gpu(index=index, name="NVIDIA card", problem=f"NVML: {error}"), ""


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _visible(cards: list[tuple[Gpu, str]], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Cards in the order of CUDA_VISIBLE_DEVICES; those it hides come last, with that problem."""
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return tuple(gpu for gpu, _ in cards)
    shown: list[Gpu] = []
    for name in (part.strip() for part in wanted.split(",")):
        match = [g for g, uuid in cards if name and (name == str(g.index) or uuid.startswith(name))]
        if not match or match[0] in shown:
            break  # CUDA's rule: the first name that is wrong ends the list
        shown.append(match[0])
    reason = f"hidden by CUDA_VISIBLE_DEVICES={wanted}"
    hidden = [_with_problem(gpu, reason) for gpu, _ in cards if gpu not in shown]
    return (*shown, *hidden)


def _with_problem(gpu: Gpu, problem: str) -> Gpu:
    return replace(gpu, problem=gpu.problem or problem)


def _without_nvml(
    files: FactFiles, environ: Mapping[str, str], reason: str
) -> tuple[Driver, tuple[Gpu, ...]]:
    """What else shows that a card is there, with every reason found why it does not answer."""
    traces = _device_files(files) or _pci_cards(files)
    said = _nvidia_smi(environ)
    problem = f"{reason}; {said}" if said else reason
    if not traces and said and "no devices" not in said.lower():
        traces = ["nvidia-smi is installed"]
    gpus = tuple(
        Gpu(index=i, name=f"NVIDIA card ({trace})", problem=problem)
        for i, trace in enumerate(traces)
    )
    version = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", _module_text(files))
    return Driver(version=version[1] if version else None, problem=problem), gpus


def _module_text(files: FactFiles) -> str:
    return files.read("/proc/driver/nvidia/version") or ""


def _device_files(files: FactFiles) -> list[str]:
    names = files.names("/dev") or []
    return [f"/dev/{name}" for name in names if re.fullmatch(r"nvidia\d+", name)]


def _pci_cards(files: FactFiles) -> list[str]:
    """PCI display controllers (class 0x03) of NVIDIA (vendor 0x10de)."""
    return _pci(files, "0x10de", ("0x03",))


def _amd_cards(files: FactFiles, first: int) -> tuple[Gpu, ...]:
    """AMD's accelerators (class 0x12, older ones 0x0380). Graphics of desktops are none."""
    found = _pci(files, "0x1002", ("0x12", "0x0380"))
    return tuple(
        Gpu(index=first + i, name=f"AMD accelerator ({place})", vendor="amd")
        for i, place in enumerate(found)
    )


def _pci(files: FactFiles, vendor: str, kinds: tuple[str, ...]) -> list[str]:
    base, found = "/sys/bus/pci/devices", []
    for name in files.names(base) or []:
        is_vendor = (files.read(f"{base}/{name}/vendor") or "").strip() == vendor
        kind = (files.read(f"{base}/{name}/class") or "").strip()
        if is_vendor and kind.startswith(kinds):
            found.append(f"PCI {name}")
    return found


def _nvidia_smi(environ: Mapping[str, str]) -> str | None:
    """What `nvidia-smi -L` complains about; None where it is not installed."""
    path = shutil.which("nvidia-smi", path=environ.get("PATH", ""))
    if path is None:
        return None
    try:
        done = subprocess.run(
            [path, "-L"], capture_output=True, text=True, errors="replace",
            timeout=NVIDIA_SMI_TIMEOUT_S, env=dict(environ), check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"nvidia-smi did not answer within {NVIDIA_SMI_TIMEOUT_S:.0f} s"
    except OSError as error:
        return f"nvidia-smi does not start: {error.strerror or error}"
    words = " ".join((done.stdout + " " + done.stderr).split())[:200]
    return f"nvidia-smi exited {done.returncode}: {words or 'without a word'}"
