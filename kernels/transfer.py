"""Values between the host and a device, in stream order and without waiting for the device.

An ordinary copy waits until the device has done all that was given to it before: one in a step
would undo the overlap of steps. On a CPU there is nothing to wait for and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

ALIGNMENT = 16
"""Bytes. Triton compiles a kernel once for addresses that are multiples of it and once more for
others: a step whose page table lay elsewhere would wait seconds for that, between two tokens.
"""


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`values` of the host on the device; the host goes on at once."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def all_to_device(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The same for several, in one copy."""
    if device.type == "cpu":
        return list(tensors)
    return unpack(to_device(pack(tensors), device), tensors)


def host_view(tensor: torch.Tensor) -> memoryview[int]:
    """The numbers of a contiguous int32 or int64 tensor of the host, one after another: slices of
    an `array` with type code i or q are copied into it in a fraction of what torch takes.
    """
    memory = memoryview(tensor.view(-1).numpy().data).cast("B")
    assert tensor.dtype in (torch.int32, torch.int64), f"no type code for {tensor.dtype}"
    return memory.cast("i") if tensor.dtype == torch.int32 else memory.cast("q")


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of all, one after another, each from a multiple of `ALIGNMENT` on."""
    parts = []
    for tensor in tensors:
        data = tensor.contiguous().view(-1).view(torch.uint8)
        parts.append(data)
        if gap := -len(data) % ALIGNMENT:
            parts.append(data.new_zeros(gap))
    return torch.cat(parts)


def unpack(packed: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of packed bytes with the types and shapes of `like`."""
    found, start = [], 0
    for tensor in like:
        stop = start + tensor.numel() * tensor.element_size()
        found.append(packed[start:stop].view(tensor.dtype).view(tensor.shape))
        start = stop + -stop % ALIGNMENT
    return found


class Arriving:
    """Tensors on their way to the host. What the device is given later does not delay them."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors = tensors
        self._event: torch.cuda.Event | None = None
        if tensors[0].device.type == "cuda":
            self._tensors = tuple(t.to("cpu", non_blocking=True) for t in tensors)  # pinned
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The values, once there. Raises RuntimeError when the device has failed."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
