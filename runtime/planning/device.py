"""Which devices of a node can be used at all, and why a card that is there cannot."""

from __future__ import annotations

import re

from .hardware import Gpu, Hardware
from .refusal import Refusal

DEVICES = ("cuda", "cpu")
"""Best first."""


def first_usable_gpu(hardware: Hardware) -> Gpu | None:
    """The card that a plan for `cuda` is made for."""
    return next((gpu for gpu in hardware.gpus if gpu.problem is None), None)


def why_not_device(hardware: Hardware, device: str) -> list[Refusal]:
    """Why nothing can run on `device` of this node; empty means it can be used."""
    refusals = [] if hardware.torch.version is not None else [_without_torch(hardware)]
    if device == "cpu":
        return refusals
    found = [_no_card(hardware), _broken_cards(hardware), _torch_build(hardware), _driver(hardware)]
    return refusals + [refusal for refusal in found if refusal is not None]


def _without_torch(hardware: Hardware) -> Refusal:
    return Refusal(
        rule="device.torch",
        kind="unavailable",
        sentence=hardware.torch.problem or "torch is not installed",
        lift="install torch",
    )


def _no_card(hardware: Hardware) -> Refusal | None:
    if hardware.gpus:
        return None
    reason = f" ({hardware.driver.problem})" if hardware.driver.problem else ""
    return Refusal(
        rule="device.card",
        kind="unavailable",
        sentence=f"no NVIDIA card was found{reason}",
        lift="a node with an NVIDIA card and its driver",
    )


def _broken_cards(hardware: Hardware) -> Refusal | None:
    if not hardware.gpus or first_usable_gpu(hardware) is not None:
        return None
    cards = "; ".join(f"{gpu.name}: {gpu.problem}" for gpu in hardware.gpus)
    return Refusal(
        rule="device.problem",
        kind="unavailable",
        sentence=f"a card is there but cannot be used: {cards}",
        lift="repair the driver (a reboot often does after an update), or make the card visible",
    )


def _torch_build(hardware: Hardware) -> Refusal | None:
    torch = hardware.torch
    if not hardware.gpus or torch.version is None or torch.cuda is not None:
        return None
    return Refusal(
        rule="device.torch_build",
        kind="unavailable",
        sentence=f"torch {torch.version} is built without CUDA",
        lift="install a CUDA build of torch (constraints-gpu.txt)",
    )


def _driver(hardware: Hardware) -> Refusal | None:
    """CUDA runs minor versions forward within a major one; a newer major needs a newer driver."""
    driver, torch = hardware.driver, hardware.torch
    built = re.match(r"\d+", torch.cuda or "")
    if driver.cuda_version is None or built is None or driver.cuda_version[0] >= int(built[0]):
        return None
    major, minor = driver.cuda_version
    return Refusal(
        rule="device.driver",
        kind="unavailable",
        sentence=f"driver {driver.version} runs CUDA up to {major}.{minor}; "
        f"torch {torch.version} is built for CUDA {torch.cuda}",
        lift=f"a driver for CUDA {built[0]}, or a torch built for CUDA {major}",
    )
