"""Finds and binds the compiled CPU kernels: one shared library per instruction set, all from the
same sources.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from .host_memory import HostMemory
from .variants import library_file

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_POOL = (_POINTER, _INT, _INT, _INT, _INT)  # data, type, page_size, kv_heads, head_dim

_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "pp_set_threads": (None, (_INT,)),
    "pp_threads": (_INT, ()),
    "pp_packed_bytes": (_LONG, (_INT, _INT, _INT)),
    "pp_pack_blocks": (None, (_POINTER, _INT, _INT, _INT, _POINTER, _INT, _INT, _POINTER)),
    "pp_pack_floats": (None, (_POINTER, _INT, _INT, _INT, _INT, _POINTER)),
    "pp_linear": (
        None,
        (_POINTER, _LONG, _INT, _POINTER, _INT, _INT, _INT, _POINTER, _POINTER, _POINTER),
    ),
    "pp_linear_best": (
        None,
        (_POINTER, _LONG, _INT, _POINTER, _INT, _INT, _INT, _POINTER, _POINTER, _POINTER),
    ),
    "pp_dequantize": (None, (_POINTER, _INT, _INT, _INT, _POINTER, _INT, _POINTER)),
    "pp_rms_norm": (None, (_POINTER, _POINTER, _FLOAT, _INT, _INT, _POINTER)),
    "pp_add_rms_norm": (
        None,
        (_POINTER, _POINTER, _POINTER, _FLOAT, _INT, _INT, _POINTER, _POINTER),
    ),
    "pp_silu_mul": (None, (_POINTER, _INT, _INT, _POINTER)),
    "pp_rope_store": (
        None,
        (*(_POINTER,) * 5, _FLOAT, *_POOL, _POINTER, _INT, _INT, _POINTER),
    ),
    "pp_attention": (
        None,
        (_POINTER, *_POOL, *(_POINTER,) * 3, _INT, _INT, _INT, _INT, _FLOAT, _POINTER),
    ),
    "pp_argmax": (None, (_POINTER, _INT, _INT, _POINTER)),
    "pp_cos_sin": (None, (_POINTER, _POINTER, _INT, _INT, _POINTER, _POINTER)),
    "pp_gather_rows": (None, (_POINTER, _POINTER, _INT, _INT, _POINTER)),
    "pp_put_columns": (None, (_POINTER, _INT, _INT, _POINTER, _LONG)),
    "pp_program_new": (_POINTER, ()),
    "pp_program_free": (None, (_POINTER,)),
    "pp_program_add": (_INT, (_POINTER, ctypes.c_char_p, _POINTER, _INT, _INT)),
    "pp_program_run": (None, (_POINTER, _INT, _INT, _INT)),
    "pp_program_bytes": (_LONG, (_POINTER,)),
}

ROWS_ARGUMENT = {
    "pp_linear": 2,
    "pp_linear_best": 2,
    "pp_dequantize": 5,
    "pp_rms_norm": 3,
    "pp_add_rms_norm": 4,
    "pp_silu_mul": 1,
    "pp_rope_store": 12,
    "pp_attention": 9,
    "pp_argmax": 1,
    "pp_cos_sin": 2,
    "pp_gather_rows": 2,
    "pp_put_columns": 1,
}
"""The kernels that a program may hold, and which argument of each is its number of rows."""


def argument_types(name: str) -> tuple[object, ...]:
    """ctypes of a function's arguments."""
    return _SIGNATURES[name][1]


Functions = Mapping[str, Callable[..., int | None]]
"""Name -> bound C function."""


class Library:
    """One loaded variant. `quick` functions keep Python's lock (for calls of microseconds), `long`
    ones release it.
    """

    def __init__(self, variant: str, path: Path) -> None:
        self.variant = variant
        self.quick = _bind(ctypes.PyDLL(str(path)))
        self.long = _bind(ctypes.CDLL(str(path)))
        self.memory = HostMemory()  # of matrices for its kernels
        self._recording: Functions | None = None
        self._recorder = 0  # the thread that captures

    def functions(self, rows: int) -> Functions:
        """The binding that fits a batch of `rows` rows; while a graph is captured, one that notes
        each call of the thread that captures instead of making it.
        """
        recording = self._recording
        if recording is not None and self._recorder == threading.get_ident():
            return recording
        return self.quick if rows <= QUICK_ROWS else self.long

    @contextmanager
    def recording(self, note: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
        """Within it `note(name, arguments)` takes every call of `functions` that this thread
        makes, which then does nothing. Other threads compute meanwhile: another engine may.
        """
        assert self._recording is None, "one capture at a time"
        self._recorder = threading.get_ident()
        self._recording = {name: _Noting(name, note) for name in ROWS_ARGUMENT}
        try:
            yield
        finally:
            self._recording = None


# up to here a call takes microseconds, and giving up Python's lock costs more than it
QUICK_ROWS = 8


class _Noting:
    """A function that notes what it is called with."""

    def __init__(self, name: str, note: Callable[[str, tuple[Any, ...]], None]) -> None:
        self._name = name
        self._note = note

    def __call__(self, *arguments: Any) -> None:  # whatever ctypes takes: ints, floats, None
        self._note(self._name, arguments)


def _bind(library: ctypes.CDLL) -> dict[str, Callable[..., int]]:
    bound: dict[str, Callable[..., int]] = {}
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, list(arguments)
        bound[name] = function
    return bound


@cache
def load(variant: str) -> Library:
    """The library of one variant, loaded once a process. OSError when it is missing or damaged."""
    path = library_file(variant)
    if path is None:
        raise OSError(
            f"the native kernels were not built for {variant}; install a C++ compiler (g++) and "
            "run "
            "`pip install -e .` or `make dev` again"
        )
    return Library(variant, path)
