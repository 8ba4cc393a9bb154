"""What no graph of a GPU can hold, named before the driver refuses it: values and shapes that only
the host would know, copies between host and device, pinned allocations, waiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .mechanism import CaptureError

FROM_HOST = (
    "a capture may not make a tensor from values on the host: a replay would see the old values; "
    "refresh it outside the graph (AttentionBackend.prepare_capture)"
)

INDEXING = frozenset(
    (
        torch.ops.aten.index.Tensor,
        torch.ops.aten.index_put.default,
        torch.ops.aten.index_put_.default,
        torch.ops.aten._index_put_impl_.default,
    )
)
"""Their result has a shape known beforehand unless an index is a mask."""

COPIES = frozenset((torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default))

WAITS = (
    (torch.cuda, "synchronize"),
    (torch.cuda.Stream, "synchronize"),
    (torch.cuda.Event, "synchronize"),
)
"""Calls that make the host wait; they reach neither functions nor operations of torch."""


def check_operation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise CaptureError for an operation of the dispatcher that cannot be captured."""
    reason = _why_not(func, args, kwargs)
    if reason is not None:
        raise CaptureError(
            f"a capture may not run {func}: {reason}; do it outside the graph "
            "(AttentionBackend.prepare_capture), or between its parts"
        )


def _why_not(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    if kwargs.get("pin_memory"):
        return "it allocates pinned memory"
    if torch.Tag.data_dependent_output in func.tags:
        return "its result is a value on the host"
    if func in INDEXING:
        return "the shape of its result depends on a mask's values" if _has_mask(args) else None
    is_sized = kwargs.get("output_size") is not None  # of repeat_interleave
    if torch.Tag.dynamic_output_shape in func.tags and not is_sized:
        return "the shape of its result depends on values"
    if func in COPIES and _crosses(args, kwargs):
        return "it copies between host and device"
    return None


def _has_mask(args: tuple[Any, ...]) -> bool:
    return any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1] or ()
    )


def _crosses(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    devices = {a.device.type for a in args if isinstance(a, torch.Tensor) and a.dim()}
    wanted = kwargs.get("device")
    if wanted is not None:
        devices.add(torch.device(wanted).type)
    return len(devices) > 1


@contextmanager
def no_waiting() -> Iterator[None]:
    """Within it a call that makes the host wait for a device is a CaptureError."""
    originals = [(owner, name, getattr(owner, name)) for owner, name in WAITS]
    for owner, name, _ in originals:
        setattr(owner, name, _refusing(f"{owner.__name__}.{name}"))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


@contextmanager
def no_host_buffers() -> Iterator[None]:
    """Within it `torch.frombuffer`, which neither functions nor operations of torch show, is a
    CaptureError.
    """
    original = torch.frombuffer

    def refuse(*args: object, **kwargs: object) -> torch.Tensor:
        raise CaptureError(FROM_HOST)

    torch.frombuffer = refuse
    try:
        yield
    finally:
        torch.frombuffer = original


def _refusing(name: str) -> Any:  # stands in for functions and methods alike
    def refuse(*args: object, **kwargs: object) -> None:
        raise CaptureError(f"a capture may not wait for the device, and {name} does")

    return refuse
