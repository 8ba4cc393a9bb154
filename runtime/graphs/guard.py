"""Watches every torch operation of a capture: what may pass, what is handed to the mechanism, what
is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .forbidden import FROM_HOST, check_operation
from .mechanism import CaptureError

HOST_READS = frozenset(
    ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "cpu")
)
"""Methods that bring a tensor's values to the host, which a replay could not do again."""

EMPTY = frozenset(
    (
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
    )
)

Empty = Callable[[torch.Size, torch.dtype], torch.Tensor]
Other = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]  # an operation and its arguments


class CaptureGuard:
    """A context. `empty` makes the tensors that the capture asks for, `addressed` sees each tensor
    whose address is taken, `other` gets every operation that is neither a view nor an `empty`.
    """

    def __init__(
        self, *, empty: Empty, addressed: Callable[[torch.Tensor], None], other: Other
    ) -> None:
        self._modes = (HostReads(addressed), _Operations(empty, other))
        self._stack = ExitStack()

    def __enter__(self) -> None:
        for mode in self._modes:
            self._stack.enter_context(mode)

    def __exit__(self, *error: object) -> None:
        self._stack.close()


class GpuGuard:
    """A context in a GPU's capture: names what cannot be captured before the driver refuses it."""

    def __init__(self) -> None:
        self._modes = (HostReads(lambda tensor: None), _Allowed())
        self._stack = ExitStack()

    def __enter__(self) -> None:
        for mode in self._modes:
            self._stack.enter_context(mode)

    def __exit__(self, *error: object) -> None:
        self._stack.close()


class _Allowed(TorchDispatchMode):
    """Runs every operation that a GPU can capture."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """See `_Operations`."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # torch's own signature
        check_operation(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class HostReads(TorchFunctionMode):
    """Sees what does not reach the dispatcher: addresses and host reads."""

    def __init__(self, addressed: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._addressed = addressed

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # torch's own signature
        name = getattr(func, "__name__", str(func))
        if name == "data_ptr":
            self._addressed(args[0])
        if name in HOST_READS and args and isinstance(args[0], torch.Tensor):
            raise CaptureError(
                f"a capture may not read a tensor on the host, and {name} does; what varies from "
                "step to step must stay a tensor that a kernel reads"
            )
        if func is torch.tensor:
            raise CaptureError(FROM_HOST)
        if name == "pin_memory" or (kwargs or {}).get("pin_memory"):
            raise CaptureError(
                f"a capture may not allocate pinned memory, and {name} does; allocate it once, "
                "before"
            )
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    """Sees every operation that the dispatcher sees."""

    def __init__(self, empty: Empty, other: Other) -> None:
        super().__init__()
        self._empty = empty
        self._other = other

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch imports its compiler at the first operation, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # torch's own signature
        kwargs = kwargs or {}
        if func in EMPTY:
            size, dtype, device = _wanted(func, args, kwargs)
            if device.type == "meta":
                return func(*args, **kwargs)
            return self._empty(size, dtype)
        if func is torch.ops.aten.lift_fresh.default:
            raise CaptureError(FROM_HOST)
        if _may_alias(func):
            result = func(*args, **kwargs)
            if _is_view(result, args):
                return result
        return self._other(func, args, kwargs)


def _wanted(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Size, torch.dtype, torch.device]:
    """Size, dtype and device that an `empty` asks for."""
    like = args[0] if isinstance(args[0], torch.Tensor) else None
    if like is not None and func is torch.ops.aten.empty_like.default:
        size = like.shape
    else:
        size = torch.Size(cast("Sequence[int]", args[0] if like is None else args[1]))
    dtype = kwargs.get("dtype") or (like.dtype if like is not None else torch.get_default_dtype())
    device = kwargs.get("device") or (like.device if like is not None else torch.device("cpu"))
    return size, dtype, torch.device(device)


def _may_alias(func: Any) -> bool:
    """Whether the operation may return a view and writes nothing."""
    returns = func._schema.returns
    return bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )


def _is_view(result: Any, args: tuple[Any, ...]) -> bool:
    """Whether every result shares memory with an argument."""
    given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
    results = result if isinstance(result, (list, tuple)) else (result,)
    return all(
        isinstance(r, torch.Tensor) and r.untyped_storage().data_ptr() in given for r in results
    )
