"""The rules that refuse a candidate: small pure functions in one table; none knows another.

A rule looks at one capability record and one `Situation` and answers with a refusal or None, so the
order in the table decides nothing but the order of the sentences.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ...kernels.cpu.variants import PORTABLE, fitting_variants
from ..config import ModelConfig
from ..forward_mode import ForwardMode
from .capability import Capability
from .device import first_usable_gpu
from .hardware import Hardware
from .quantization import why_not_width
from .refusal import Refusal, RefusalKind

Rule = Callable[["Capability", "Situation"], "Refusal | None"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """What a candidate is asked to do: the node, the model, and the values that all modes share."""

    hardware: Hardware
    model: ModelConfig
    device: str
    dtype: str
    kv_dtype: str
    page_size: int
    quantization: str = "auto"  # as asked
    mode: ForwardMode | None = None  # None: whatever the mode


def why_not(capability: Capability, situation: Situation) -> list[Refusal]:
    """Every refusal, in the order of the table; empty means it fits."""
    found = [rule(capability, situation) for rule in RULES]
    return [refusal for refusal in found if refusal is not None]


def _built(capability: Capability, situation: Situation) -> Refusal | None:
    if capability.built:
        return None
    return _no(
        "adapter",
        "unavailable",
        f"this version has no adapter for {capability.name}",
        f"a version of Polypath that has {capability.source}",
    )


def _mode(capability: Capability, situation: Situation) -> Refusal | None:
    if situation.mode is None or situation.mode in capability.modes:
        return None
    modes = ", ".join(capability.modes)
    return _no(
        "mode",
        "unavailable",
        f"{capability.name} does not run {situation.mode} batches",
        f"it is for {modes}; another candidate runs the other modes of the same plan",
    )


def _device(capability: Capability, situation: Situation) -> Refusal | None:
    if situation.device in capability.devices:
        return None
    devices = " or ".join(capability.devices)
    return _no(
        "device",
        "unavailable",
        f"{capability.name} needs a {devices} device; this plan is for {situation.device}",
        "--device cpu" if capability.devices == ("cpu",) else "a node with a usable NVIDIA card",
    )


def _compute_capability(capability: Capability, situation: Situation) -> Refusal | None:
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
    return _no(
        "compute_capability",
        "unavailable",
        f"{capability.name} needs compute capability {wanted}; "
        f"{gpu.name if gpu is not None else 'the card'} has {has}",
        f"a GPU of compute capability {wanted}",
    )


def _architecture(capability: Capability, situation: Situation) -> Refusal | None:
    found, wanted = situation.hardware.cpu.architecture, capability.architectures
    if situation.device != "cpu" or wanted is None or found in wanted:
        return None
    names = " or ".join(wanted)
    return _no(
        "architecture",
        "unavailable",
        f"{capability.name} is written for {names}; this processor is {found}",
        f"a node with an {names} processor",
    )


def _isa(capability: Capability, situation: Situation) -> Refusal | None:
    missing = [flag for flag in capability.required_isa if flag not in situation.hardware.cpu.isa]
    if situation.device != "cpu" or not missing:
        return None
    flags = ", ".join(missing)
    return _no(
        "isa",
        "unavailable",
        f"{capability.name} needs the CPU flags {', '.join(capability.required_isa)}; "
        f"the kernel does not show {flags}",
        f"a processor (and a hypervisor that passes on its flags) with {flags}",
    )


def _dtype(capability: Capability, situation: Situation) -> Refusal | None:
    accepted = capability.dtypes_for(situation.device)
    if situation.device not in capability.devices or situation.dtype in accepted:
        return None
    return _no(
        "dtype",
        "correctness",
        f"{capability.name} computes in {', '.join(accepted)} on {situation.device}; "
        f"this plan is for {situation.dtype}",
        f"--dtype {accepted[0]}" if accepted else f"another device than {situation.device}",
    )


def _kv_dtype(capability: Capability, situation: Situation) -> Refusal | None:
    accepted = capability.kv_dtypes or (situation.dtype,)
    if capability.kind != "attention" or situation.kv_dtype in accepted:
        return None
    return _no(
        "kv_dtype",
        "correctness",
        f"{capability.name} reads keys and values in {', '.join(accepted)}; "
        f"this plan stores {situation.kv_dtype}",
        f"--kv-dtype {accepted[0]}",
    )


def _page_size(capability: Capability, situation: Situation) -> Refusal | None:
    accepted = capability.page_sizes
    if accepted is None or situation.page_size in accepted:
        return None
    sizes = ", ".join(map(str, accepted))
    return _no(
        "page_size",
        "correctness",
        f"{capability.name} takes pages of {sizes} tokens; this plan has {situation.page_size}",
        f"--page-size {accepted[0]}",
    )


def _head_dim(capability: Capability, situation: Situation) -> Refusal | None:
    accepted, found = capability.head_dims, situation.model.head_dim
    if accepted is None or found in accepted:
        return None
    few = ", ".join(map(str, accepted)) if len(accepted) < 9 else f"{accepted[0]} to {accepted[-1]}"
    return _no(
        "head_dim",
        "correctness",
        f"{capability.name} takes head dimensions {few}; this model has {found}",
        "a model with one of these head dimensions",
    )


def _group_size(capability: Capability, situation: Situation) -> Refusal | None:
    limit, found = capability.max_group_size, situation.model.group_size
    if limit is None or found <= limit:
        return None
    return _no(
        "group_size",
        "correctness",
        f"{capability.name} takes {limit} query heads for each key/value head; "
        f"this model has {found}",
        f"a model with at most {limit}",
    )


def _sliding_window(capability: Capability, situation: Situation) -> Refusal | None:
    windows = sorted({w for w in situation.model.layer_windows if w is not None})
    if capability.kind != "attention" or capability.sliding_window or not windows:
        return None
    return _no(
        "sliding_window",
        "correctness",
        f"{capability.name} has no sliding window; layers of this model see only the last "
        f"{windows[0]} tokens",
        "a model without sliding windows",
    )


def _packages(capability: Capability, situation: Situation) -> Refusal | None:
    reasons = [
        reason
        for requirement in capability.packages
        if (reason := _package_problem(requirement, situation.hardware)) is not None
    ]
    if not reasons:
        return None
    return _no(
        "package",
        "unavailable",
        f"{capability.name} needs {', '.join(capability.packages)}: {'; '.join(reasons)}",
        f"install a working {' and '.join(capability.packages)}",
    )


def _package_problem(requirement: str, hardware: Hardware) -> str | None:
    name, _, minimum = requirement.partition(">=")
    package = hardware.packages.get(name)
    if package is None or package.version is None:
        return f"{name} is not installed"
    if package.imports is False:
        return f"{name} {package.version} does not import ({package.problem})"
    if minimum and _numbers(package.version) < _numbers(minimum):
        return f"{name} {package.version} is older than {minimum}"
    return None


def _numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: "0.6.18.post1+cu130" is (0, 6, 18)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _compiler(capability: Capability, situation: Situation) -> Refusal | None:
    compiler = situation.hardware.compiler
    if not capability.needs_compiler or compiler.can_build:
        return None
    reason = compiler.problem or "Python's headers (Python.h) are not installed"
    return _no(
        "compiler",
        "unavailable",
        f"{capability.name} is compiled at start and cannot be here: {reason}",
        "install a C++ compiler and Python's headers (Debian: apt install g++ python3-dev)",
    )


def native_variant(hardware: Hardware) -> str | None:
    """The fastest installed build of kernels/cpu that this CPU can run and that pays, or None."""
    fitting = fitting_variants(hardware.cpu.isa)
    installed = [variant for variant in hardware.native_kernels if variant in fitting]
    return installed[0] if installed and installed[0] != PORTABLE else None


FLAGS = ("avx2", "fma", "f16c")
"""Without these only the portable build of the native kernels runs."""


def _native_kernels(capability: Capability, situation: Situation) -> Refusal | None:
    hardware = situation.hardware
    if situation.device != "cpu" or not capability.native_kernels or native_variant(hardware):
        return None
    missing = [flag for flag in FLAGS if flag not in hardware.cpu.isa]
    if missing:
        return _no(
            "native_kernels.isa",
            "performance",
            f"{capability.name} would run its portable build, which torch outruns: the kernel "
            f"does not show {', '.join(missing)}",
            f"a processor (and a hypervisor that passes on its flags) with {', '.join(FLAGS)}",
        )
    reason = hardware.compiler.problem
    because = f", and no compiler works here: {reason}" if reason else ""
    return _no(
        "native_kernels.missing",
        "unavailable",
        f"{capability.name} needs kernels that were not compiled when Polypath was installed"
        f"{because}",
        "install a C++ compiler (Debian: apt install g++ python3-dev) and install Polypath again",
    )


def _no(rule: str, kind: RefusalKind, sentence: str, lift: str) -> Refusal:
    return Refusal(rule=rule, kind=kind, sentence=sentence, lift=lift)


RULES: tuple[Rule, ...] = (
    _device,
    _compute_capability,
    _architecture,
    _isa,
    _packages,
    _compiler,
    _native_kernels,
    why_not_width,
    _dtype,
    _kv_dtype,
    _page_size,
    _head_dim,
    _group_size,
    _sliding_window,
    _mode,
    _built,
)
