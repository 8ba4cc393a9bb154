"""Which devices of a node can be used at all, and why a card that is there cannot."""

from __future__ import annotations

import re

from .hardware import Gpu, Hardware
from .refusal import Refusal
from .rule import Verdict, ask_all, rule

DEVICES = ("cuda", "cpu")
"""Best first."""


def first_usable_gpu(hardware: Hardware) -> Gpu | None:
    """The card that a plan for `cuda` is made for."""
    fitting = (gpu for gpu in hardware.gpus if gpu.problem is None and gpu.vendor == "nvidia")
    return next(fitting, None)


def why_not_device(hardware: Hardware, device: str) -> list[Refusal]:
    """Why nothing can run on `device` of this node; empty means it can be used."""
    return ask_all(DEVICE_RULES if device == "cpu" else (*DEVICE_RULES, *CARD_RULES), hardware)


@rule(
    "device.torch",
    "unavailable",
    refuses="every plan on a node without torch",
    source="SGLang #18507: the CPU backend dies while its arguments are handled",
)
def has_torch(hardware: Hardware) -> Verdict | None:
    if hardware.torch.version is not None:
        return None
    return hardware.torch.problem or "torch is not installed", "install torch"


@rule(
    "device.card",
    "unavailable",
    refuses="`cuda` on a node without a card",
    source="SGLang #27456",
)
def has_card(hardware: Hardware) -> Verdict | None:
    if hardware.gpus:
        return None
    reason = f" ({hardware.driver.problem})" if hardware.driver.problem else ""
    return f"no NVIDIA card was found{reason}", "a node with an NVIDIA card and its driver"


@rule(
    "device.vendor",
    "untested",
    refuses="cards that are not NVIDIA's: there are no paths for ROCm in this version",
    source="operators set backends card by card (gpustack #3326, #3839)",
)
def has_nvidia(hardware: Hardware) -> Verdict | None:
    others = [gpu.name for gpu in hardware.gpus if gpu.vendor != "nvidia"]
    if len(others) < len(hardware.gpus) or not others:
        return None
    return (
        f"{others[0]} is no NVIDIA card; runners, attention backends and ops of this version are "
        "written for CUDA, and none was tried on ROCm",
        "--device cpu, or a node with an NVIDIA card",
    )


@rule(
    "device.problem",
    "unavailable",
    refuses="cards that are there and do not answer",
    source="ollama #15918, #16684, #16415: half an hour on the CPU after a driver update",
)
def has_working_card(hardware: Hardware) -> Verdict | None:
    broken = [gpu for gpu in hardware.gpus if gpu.problem is not None]
    if not broken or first_usable_gpu(hardware) is not None:
        return None
    cards = "; ".join(f"{gpu.name}: {gpu.problem}" for gpu in broken)
    return (
        f"a card is there but cannot be used: {cards}",
        "repair the driver (a reboot often does after an update), or make the card visible",
    )


@rule(
    "device.torch_build",
    "unavailable",
    refuses="a card under a torch that is built without CUDA",
    source="vLLM #17249, #18301: the build that is installed decides the platform",
)
def has_cuda_build(hardware: Hardware) -> Verdict | None:
    torch = hardware.torch
    if first_usable_gpu(hardware) is None or torch.version is None or torch.cuda is not None:
        return None
    return (
        f"torch {torch.version} is built without CUDA",
        "install a CUDA build of torch (constraints-gpu.txt)",
    )


@rule(
    "device.driver",
    "unavailable",
    refuses="a driver older than the CUDA that torch is built for",
    source="ollama #16684; CUDA runs minor versions forward within a major one, never a newer one",
)
def has_driver(hardware: Hardware) -> Verdict | None:
    driver, torch = hardware.driver, hardware.torch
    built = re.match(r"\d+", torch.cuda or "")
    if driver.cuda_version is None or built is None or driver.cuda_version[0] >= int(built[0]):
        return None
    major, minor = driver.cuda_version
    return (
        f"driver {driver.version} runs CUDA up to {major}.{minor}; "
        f"torch {torch.version} is built for CUDA {torch.cuda}",
        f"a driver for CUDA {built[0]}, or a torch built for CUDA {major}",
    )


OLDEST_CARD = (7, 5)
BLACKWELL, BLACKWELL_CUDA = (10, 0), (12, 8)
"""Its first compute capability, and the first CUDA whose builds hold code for it."""


@rule(
    "device.card_age",
    "unavailable",
    refuses="cards older than Turing, and cards newer than torch's build",
    source="SGLang refuses cards below 7.5, as CUDA 13 does; #9140, #17880: new cards, old builds",
)
def has_card_of_age(hardware: Hardware) -> Verdict | None:
    gpu, built = first_usable_gpu(hardware), re.match(r"(\d+)\.(\d+)", hardware.torch.cuda or "")
    found = gpu.compute_capability if gpu is not None else None
    if gpu is None or found is None:
        return None
    if found < OLDEST_CARD:
        return (
            f"{gpu.name} has compute capability {found[0]}.{found[1]}; the oldest is 7.5",
            "a card of compute capability 7.5",
        )
    if found < BLACKWELL or built is None or (int(built[1]), int(built[2])) >= BLACKWELL_CUDA:
        return None
    return (
        f"{gpu.name} has compute capability {found[0]}.{found[1]}, for which CUDA 12.8 was the "
        f"first; torch {hardware.torch.version} is built for CUDA {hardware.torch.cuda}",
        "install the torch of constraints-gpu.txt",
    )


DEVICE_RULES = (has_torch,)
CARD_RULES = (
    has_card,
    has_nvidia,
    has_working_card,
    has_cuda_build,
    has_driver,
    has_card_of_age,
)
