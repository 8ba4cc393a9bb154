"""Hands launches of Triton kernels, compiled or interpreted, to who notes them instead of making
them: a graph's capture does no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One launch, with everything that it was given."""

    kernel: Any  # InterpretedFunction or JITFunction, which have no common type with a typed `run`
    grid: Any  # numbers of programs, or a function that gives them
    arguments: tuple[Any, ...]  # tensors, numbers and constants of the kernel
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """Of the kernel."""
        return self.kernel.fn.__name__

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Whose addresses the kernel gets."""
        given = (*self.arguments, *self.options.values())
        return tuple(value for value in given if isinstance(value, torch.Tensor))

    def mapped(self, change: Callable[[Any], Any]) -> Launch:
        """The same launch with every argument changed."""
        arguments = tuple(change(value) for value in self.arguments)
        options = {name: change(value) for name, value in self.options.items()}
        return replace(self, arguments=arguments, options=options)

    def run(self) -> None:
        """Make it."""
        self.kernel.run(*self.arguments, grid=self.grid, warmup=False, **self.options)


@contextmanager
def noting(note: Callable[[Launch], None]) -> Iterator[None]:
    """Within it `note` takes every launch of this process, which then does nothing."""
    classes: tuple[Any, ...] = (JITFunction, InterpretedFunction)
    originals = [kernel_class.run for kernel_class in classes]
    for kernel_class, run in zip(classes, originals, strict=True):
        kernel_class.run = _noting(run, note)
    try:
        yield
    finally:
        for kernel_class, run in zip(classes, originals, strict=True):
            kernel_class.run = run


def _noting(run: Callable[..., object], note: Callable[[Launch], None]) -> Callable[..., object]:
    def noted(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> object:
        if warmup:  # only compiles
            return run(kernel, *args, grid=grid, warmup=True, **options)
        note(Launch(kernel=kernel, grid=grid, arguments=args, options=options))
        return None

    return noted
