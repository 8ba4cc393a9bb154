"""Facts about one node and its devices (`Hardware`), probed or read from a profile; no choices."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigurationError
from .record import from_json, to_json

SCHEMA = 1
THIS_NODE = "this"
PROFILES = Path(__file__).resolve().parent.parent / "profiles"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cpu:
    """The host's processor as this process may use it."""

    name: str
    architecture: str  # as `uname -m` spells it
    cores_total: int  # logical, of the host
    cores_usable: int  # logical; after affinity and cgroup quota
    cores_origin: str  # what made `cores_usable` the smallest
    isa: tuple[str, ...] = ()  # flags as the kernel spells them, those that kernels choose by
    cores_given: float | None = None  # by Ray, where that made `cores_usable` the smallest


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Host memory: `total_bytes` is the least of the host's and every cgroup's; None is unknown."""

    total_bytes: int | None
    free_bytes: int | None  # what this process may still take
    origin: str  # who set `total_bytes`
    process_bytes: int = 0  # resident in the probing process, so no longer free


@dataclass(frozen=True, kw_only=True, slots=True)
class NumaNode:
    """One NUMA node; it may have no CPUs, or no memory."""

    id: int
    cpus: tuple[int, ...]
    memory_bytes: int | None  # None: could not be read


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One card. `problem` says why it cannot be used although it is there."""

    index: int
    name: str
    total_bytes: int | None = None
    free_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None
    problem: str | None = None
    vendor: Literal["nvidia", "amd"] = "nvidia"


@dataclass(frozen=True, kw_only=True, slots=True)
class Driver:
    """The NVIDIA driver. `problem` is why there is none, or why it does not answer."""

    version: str | None = None
    cuda_version: tuple[int, int] | None = None  # the newest CUDA it runs
    problem: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Torch:
    """The installed torch, read without importing it."""

    version: str | None  # such as 2.13.0+cpu
    cuda: str | None = None  # CUDA version of the build; None is a build without CUDA
    problem: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """One optional package; `imports` is None where that was not tried (see probe_software.py)."""

    version: str | None  # None: not installed
    imports: bool | None = None
    problem: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiler:
    """The C++ compiler that a build would use, and whether it could build a Python extension."""

    path: str | None
    version: str | None = None
    python_headers: bool = False
    problem: str | None = None

    @property
    def can_build(self) -> bool:
        """Whether native kernels could be compiled here."""
        return self.path is not None and self.problem is None and self.python_headers


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Everything the planner may know about a node. `numa` is None where topology is unknown."""

    name: str
    origin: Literal["probe", "profile"]
    software: str  # one line: what was found, or what a profile assumes
    cpu: Cpu
    memory: Memory
    torch: Torch
    driver: Driver = field(default_factory=Driver)
    gpus: tuple[Gpu, ...] = ()
    numa: tuple[NumaNode, ...] | None = None
    python: str = ""
    packages: dict[str, Package] = field(default_factory=dict)
    compiler: Compiler = field(default_factory=lambda: Compiler(path=None))
    nvcc: str | None = None  # version of CUDA's compiler; None: there is none
    native_kernels: tuple[str, ...] = ()  # builds of kernels/cpu that are installed, fastest first
    notes: tuple[str, ...] = ()  # what could not be read, and why

    @property
    def device_kind(self) -> str:
        """`cuda` where a card is present, whether it can be used or not, else `cpu`."""
        return "cuda" if self.gpus else "cpu"

    @property
    def device_name(self) -> str:
        """Name of the first card, else of the processor."""
        return self.gpus[0].name if self.gpus else self.cpu.name

    @property
    def cores_usable(self) -> int:
        """Logical cores after affinity and cgroup quota."""
        return self.cpu.cores_usable

    def with_cores_given(self, cores: float | None) -> Hardware:
        """The same node for a process that Ray gave `cores` CPUs: no more threads than that,
        rounded up, and at least one. None changes nothing.
        """
        if cores is None:
            return self
        usable, given = self.cpu.cores_usable, max(1, math.ceil(cores))
        if given >= usable:
            return self
        origin = f"Ray gave this worker {cores:g} CPUs of {usable}"
        cpu = replace(self.cpu, cores_usable=given, cores_origin=origin, cores_given=cores)
        return replace(self, cpu=cpu)

    def with_library(self, path: str | None) -> Hardware:
        """The same node with a file of FlashAttention that the user named, as one more package."""
        if path is None or "flash_attn_library" in self.packages:
            return self
        named = {"flash_attn_library": Package(version=Path(path).name)}
        return replace(self, packages=self.packages | named)

    def without_packages(self, names: tuple[str, ...], problem: str) -> Hardware:
        """The same node once it has shown that these packages do not work."""
        broken = {
            name: replace(self.packages.get(name, Package(version=None)), imports=False)
            for name in names
        }
        broken = {name: replace(found, problem=problem) for name, found in broken.items()}
        return replace(self, packages=self.packages | broken)

    def to_json(self) -> dict[str, Any]:  # Any: plain JSON
        """All facts, with the schema's version first."""
        return {"schema": SCHEMA, **to_json(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Hardware:
        """Inverse of `to_json`; ConfigurationError for another schema or an unknown key."""
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise ConfigurationError(
                f"hardware schema is {found!r}; this version reads {SCHEMA}: "
                "write the file anew with `polypath probe --json`"
            )
        return from_json(cls, {key: item for key, item in data.items() if key != "schema"})


def profile_names() -> tuple[str, ...]:
    """Names of the profiles that come with Polypath."""
    return tuple(sorted(path.stem for path in PROFILES.glob("*.json")))


def load_hardware(name_or_file: str) -> Hardware:
    """This node ("this"), a profile by name, or a file written by `polypath probe --json`."""
    if name_or_file == THIS_NODE:
        from .probe import probe

        return probe()
    if name_or_file in profile_names():
        return read_hardware(PROFILES / f"{name_or_file}.json")
    path = Path(name_or_file).expanduser()
    if not path.is_file():
        names = ", ".join((THIS_NODE, *profile_names()))
        raise ConfigurationError(
            f"hardware {name_or_file!r} is neither a profile nor a file; profiles are {names}"
        )
    return read_hardware(path)


def read_hardware(path: Path) -> Hardware:
    """Hardware from a JSON file; ConfigurationError names the file."""
    try:
        return Hardware.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, ConfigurationError) as error:
        raise ConfigurationError(f"hardware file {path}: {error}") from error
