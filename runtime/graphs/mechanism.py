"""The contract of a graph mechanism: how a forward pass is captured once and run again from fixed
addresses.

A graph runner (runners/graph.py) is generic over it. Rules for all: what varies from step to step
is a tensor read at replay; every tensor made during a capture lives in the mechanism's pool; an
operation that cannot be captured is an error that names it, or, in a breakable capture, a break:
the graph stops there, Python runs the operation, and the graph goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ..errors import EngineError

Forward = Callable[[], Sequence[torch.Tensor]]
"""What is captured: reads static inputs, returns its outputs."""

Break = Callable[[int], object]
"""Run between two parts of a graph, with the number of live rows."""


class CaptureError(EngineError):
    """A forward pass cannot be captured; the text names the operation and what would help."""


class ReplayError(EngineError, RuntimeError):
    """A graph may not be run as it is: what it was captured with is no longer there. A step that
    raises it is tried again eagerly, as after any RuntimeError.
    """


class CapturedGraph(Protocol):
    """One captured forward pass over at most `rows` rows."""

    rows: int
    outputs: tuple[torch.Tensor, ...]  # written by each replay, valid until the next one

    def replay(self, rows: int, inputs: Sequence[torch.Tensor]) -> None:
        """Run it over the first `rows` rows of its static inputs. Raises ReplayError."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of this graph besides the shared pool."""
        ...


class GraphMechanism(Protocol):
    """Captures graphs that share one pool; the largest comes first."""

    name: str
    pads: bool  # whether a replay computes all rows of a graph, live or not
    reads_memory: bool  # whether a replay sees what the host wrote without torch

    def warm_up(self, forward: Forward, *, is_breakable: bool) -> None:
        """Run once outside any graph: lets lazy set-up happen, and measures what a capture needs.
        Raises CaptureError.
        """
        ...

    def begin(self, rows: int, inputs: Sequence[torch.Tensor], *, is_breakable: bool) -> None:
        """From now on operations are captured. `rows` is the number of rows of every one."""
        ...

    def break_(
        self, call: Break, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        """Within a breakable capture: `call` runs here at every replay. It must touch no tensor of
        the capture but these, and hold them as `weak` gives them. Where all rows are computed it
        may be called with no live row before and while the graph is captured.
        """
        ...

    def weak(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the capture as a break may keep it: it does not hold memory that later parts
        and smaller graphs are to use again.
        """
        ...

    def end(self, outputs: Sequence[torch.Tensor]) -> CapturedGraph:
        """The graph; nothing is captured any more."""
        ...

    def abandon(self) -> None:
        """End a capture that failed; leaves what was captured before."""
        ...

    def poison(self) -> None:
        """Make the pool's content worthless (NaN), which a right graph does not notice."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of the shared pool."""
        ...
