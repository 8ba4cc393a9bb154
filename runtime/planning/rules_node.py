"""Rules about the node: device, card, processor, packages, compiler, installed kernels."""

from __future__ import annotations

import re

from ...kernels.cpu.variants import PORTABLE, fitting_variants
from .capability import Capability, Carrier
from .device import first_usable_gpu
from .hardware import Hardware
from .priorities import device_class, is_listed
from .rule import Verdict, rule
from .situation import Situation


@rule(
    "device",
    "unavailable",
    refuses="a candidate written for another kind of device",
    source="SGLang #27456: a start without a GPU runs into a CUDA assertion",
)
def for_device(capability: Capability, situation: Situation) -> Verdict | None:
    if situation.device in capability.devices:
        return None
    devices = " or ".join(capability.devices)
    return (
        f"{capability.name} needs a {devices} device; this plan is for {situation.device}",
        "--device cpu" if capability.devices == ("cpu",) else "a node with a usable NVIDIA card",
    )


@rule(
    "compute_capability",
    "unavailable",
    refuses="a candidate on a card outside the range it was compiled and made for",
    source="SGLang #12178: fa3 by default on a card that cannot run it; vLLM #4246, #15853: Turing",
)
def in_capability_range(capability: Capability, situation: Situation) -> Verdict | None:
    low, high = capability.min_compute_capability, capability.max_compute_capability
    if (
        situation.device != "cuda"
        or "cuda" not in capability.devices
        or (low, high) == (None, None)
    ):
        return None
    gpu = first_usable_gpu(situation.hardware)
    found = gpu.compute_capability if gpu is not None else None
    if found is not None and (low is None or found >= low) and (high is None or found <= high):
        return None
    wanted = " and ".join(
        f"{word} {bound[0]}.{bound[1]}"
        for word, bound in (("at least", low), ("at most", high))
        if bound is not None
    )
    has = f"{found[0]}.{found[1]}" if found is not None else "unknown"
    return (
        f"{capability.name} needs compute capability {wanted}; "
        f"{gpu.name if gpu is not None else 'the card'} has {has}",
        f"a GPU of compute capability {wanted}",
    )


@rule(
    "device_class",
    "untested",
    refuses="a candidate that is on no list for this class of device (see the lists below)",
    source="SGLang #14842, #14814, #24633, #40558: backends picked on sm_120 cards by a rule that "
    "was written for others",
)
def on_the_list(capability: Capability, situation: Situation) -> Verdict | None:
    if situation.device not in capability.devices:
        return None
    found = device_class(situation.hardware, situation.device)
    if is_listed(capability.kind, capability.name, found):
        return None
    return (
        f"{capability.name} is on no list for {found}: nobody has shown that it runs right there",
        "another candidate of the list, or a node of another class",
    )


@rule(
    "architecture",
    "unavailable",
    refuses="kernels written for another processor family",
    source="vLLM #32840: CPU kernels and the processors they are for",
)
def for_architecture(capability: Capability, situation: Situation) -> Verdict | None:
    found, wanted = situation.hardware.cpu.architecture, capability.architectures
    if situation.device != "cpu" or wanted is None or found in wanted:
        return None
    names = " or ".join(wanted)
    return (
        f"{capability.name} is written for {names}; this processor is {found}",
        f"a node with an {names} processor",
    )


@rule(
    "isa",
    "unavailable",
    refuses="kernels that need instructions the processor, or its hypervisor, does not show",
    source="ollama #644, llama.cpp #8734: illegal instruction; SGLang: intel_amx without AMX",
)
def has_instructions(capability: Capability, situation: Situation) -> Verdict | None:
    missing = [flag for flag in capability.required_isa if flag not in situation.hardware.cpu.isa]
    if situation.device != "cpu" or not missing:
        return None
    flags = ", ".join(missing)
    return (
        f"{capability.name} needs the CPU flags {', '.join(capability.required_isa)}; "
        f"the kernel does not show {flags}",
        f"a processor (and a hypervisor that passes on its flags) with {flags}",
    )


@rule(
    "package",
    "unavailable",
    refuses="a candidate whose package is missing, of another version, or does not import",
    source="vLLM #10662, #9922, #14320: which backend, and why not the other; the pins of "
    "vllm-flash-attn on PyPI",
)
def has_packages(capability: Capability, situation: Situation) -> Verdict | None:
    reasons = [
        reason
        for requirement in capability.packages
        if (reason := package_problem(requirement, situation.hardware)) is not None
    ]
    if reasons:
        return (
            f"{capability.name} needs {', '.join(capability.packages)}: {'; '.join(reasons)}",
            f"install a working {' and '.join(capability.packages)}",
        )
    if not capability.carriers or first_carrier(capability, situation) is not None:
        return None
    names = [carrier.package for carrier in capability.carriers]
    reasons = [str(carrier_problem(carrier, situation)) for carrier in capability.carriers]
    return (
        f"{capability.name} needs one of {', '.join(names)}: {'; '.join(reasons)}",
        f"install a working {' or '.join(names)} (docs/gpu.md)",
    )


def first_carrier(capability: Capability, situation: Situation) -> Carrier | None:
    """The package that a candidate with carriers will be run from."""
    fitting = (c for c in capability.carriers if carrier_problem(c, situation) is None)
    return next(fitting, None)


def carrier_problem(carrier: Carrier, situation: Situation) -> str | None:
    """Why this package cannot be used here; None where it can."""
    hardware = situation.hardware
    missing = package_problem(carrier.package, hardware)
    if missing is not None:
        return missing
    if situation.page_size % carrier.page_multiple:
        return (
            f"{carrier.package} takes pages of a multiple of {carrier.page_multiple} tokens, not "
            f"{situation.page_size}"
        )
    found = (hardware.torch.version or "").partition("+")[0]
    if carrier.torch not in (None, found):
        return f"{carrier.package} is built for torch {carrier.torch} alone, not {found}"
    gpu = first_usable_gpu(hardware)
    major, minor = (gpu.compute_capability if gpu is not None else None) or (0, 0)
    if carrier.compute_capability not in (None, major):
        wanted = carrier.compute_capability
        return f"{carrier.package} needs compute capability {wanted}.x, not {major}.{minor}"
    return None


def package_problem(requirement: str, hardware: Hardware) -> str | None:
    """Why "name" or "name>=1.2,<2" is not met; None where it is."""
    match = re.match(r"[A-Za-z0-9_.-]+", requirement)
    assert match is not None, f"{requirement!r} names no package"
    package = hardware.packages.get(match[0])
    if package is None or package.version is None:
        return f"{match[0]} is not installed"
    if package.imports is False:
        return f"{match[0]} {package.version} does not import ({package.problem})"
    for bound in filter(None, requirement[match.end() :].split(",")):
        problem = _version_problem(package.version, bound)
        if problem is not None:
            return f"{match[0]} {package.version} {problem}"
    return None


def _version_problem(version: str, bound: str) -> str | None:
    sign, limit = re.fullmatch(r"(>=|<)(.+)", bound).groups()  # pyright: ignore[reportOptionalMemberAccess]
    if sign == ">=":
        return f"is older than {limit}" if _numbers(version) < _numbers(limit) else None
    return None if _numbers(version) < _numbers(limit) else f"is not older than {limit}"


def _numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: "0.6.18.post1+cu130" is (0, 6, 18)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


@rule(
    "compiler",
    "unavailable",
    refuses="a candidate that compiles at start, where no compiler works",
    source="vLLM #2997, #15329; SGLang #1067: the error came at the first request or in a capture",
)
def has_compiler(capability: Capability, situation: Situation) -> Verdict | None:
    compiler = situation.hardware.compiler
    if not capability.needs_compiler or compiler.can_build:
        return None
    reason = compiler.problem or "Python's headers (Python.h) are not installed"
    return (
        f"{capability.name} is compiled at start and cannot be here: {reason}",
        "install a C++ compiler and Python's headers (Debian: apt install g++ python3-dev)",
    )


JIT_CACHE = "flashinfer_jit_cache"
"""The package of kernels that were compiled before."""


@rule(
    "nvcc",
    "unavailable",
    refuses="kernels that nvcc compiles on their first call, where there is none",
    source="SGLang #5389: compiled at the first request; FlashInfer's wheel holds sources",
)
def has_nvcc(capability: Capability, situation: Situation) -> Verdict | None:
    hardware = situation.hardware
    if situation.device != "cuda" or not capability.needs_nvcc or hardware.nvcc is not None:
        return None
    if package_problem(JIT_CACHE, hardware) is None:
        return None
    return (
        f"{capability.name} compiles its kernels with nvcc, which is not here, nor is {JIT_CACHE}",
        "install CUDA's toolkit (nvcc), or flashinfer-jit-cache",
    )


FLAGS = ("avx2", "fma", "f16c")
"""Without these only the portable build of the native kernels runs."""


def native_variant(hardware: Hardware) -> str | None:
    """The fastest installed build of kernels/cpu that this CPU can run and that pays, or None."""
    fitting = fitting_variants(hardware.cpu.isa)
    installed = [variant for variant in hardware.native_kernels if variant in fitting]
    return installed[0] if installed and installed[0] != PORTABLE else None


def _missing_flags(capability: Capability, situation: Situation) -> list[str] | None:
    """Flags that keep the fast builds away; None where the native rules have nothing to say."""
    hardware = situation.hardware
    if situation.device != "cpu" or not capability.native_kernels or native_variant(hardware):
        return None
    return [flag for flag in FLAGS if flag not in hardware.cpu.isa]


@rule(
    "native_kernels.isa",
    "performance",
    refuses="native kernels where only their portable build runs, which torch outruns",
    source="llama.cpp #8734: instructions that are not there",
)
def has_fast_build(capability: Capability, situation: Situation) -> Verdict | None:
    missing = _missing_flags(capability, situation)
    if not missing:
        return None
    architecture = situation.hardware.cpu.architecture
    if architecture != "x86_64":
        return (
            f"{capability.name} has fast builds for x86_64; this processor is {architecture}, for "
            "which only the portable build is there",
            "an x86_64 processor with " + ", ".join(FLAGS),
        )
    return (
        f"{capability.name} would run its portable build, which torch outruns: the kernel "
        f"does not show {', '.join(missing)}",
        f"a processor (and a hypervisor that passes on its flags) with {', '.join(FLAGS)}",
    )


@rule(
    "native_kernels.missing",
    "unavailable",
    refuses="native kernels that were not compiled when Polypath was installed",
    source="vLLM #2997; SGLang #1067: slim images have no compiler",
)
def has_native_build(capability: Capability, situation: Situation) -> Verdict | None:
    missing = _missing_flags(capability, situation)
    if missing is None or missing:
        return None
    reason = situation.hardware.compiler.problem
    because = f", and no compiler works here: {reason}" if reason else ""
    return (
        f"{capability.name} needs kernels that were not compiled when Polypath was installed"
        f"{because}",
        "install a C++ compiler (Debian: apt install g++ python3-dev) and install Polypath again",
    )


NODE_RULES = (
    for_device,
    in_capability_range,
    on_the_list,
    for_architecture,
    has_instructions,
    has_packages,
    has_compiler,
    has_nvcc,
    has_fast_build,
    has_native_build,
)
