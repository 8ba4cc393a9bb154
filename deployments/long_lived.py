"""What a process makes while it starts, out of sight of Python's garbage collector.

A full collection walks all that torch, Ray and FastAPI define: 0.2 s for 180,000 objects beside a
bare engine, in which no stream gets a token. It comes whenever a quarter more has piled up. None of
these objects is ever garbage.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from ..runtime.collector import paused


@contextmanager
def long_lived() -> Iterator[None]:
    """What exists at the end is never looked at again; nothing is collected inside. For a process
    that serves until it ends: garbage of before would stay too.
    """
    with paused():
        yield
        gc.freeze()
