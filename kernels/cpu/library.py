"""Finds and binds the compiled CPU kernels: one shared library per instruction set, all from the
same sources.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

from .variants import library_file

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_POOL = (_POINTER, _INT, _INT, _INT, _INT)  # data, type, page_size, kv_heads, head_dim

_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "pp_set_threads": (None, (_INT,)),
    "pp_threads": (_INT, ()),
    "pp_packed_bytes": (_LONG, (_INT, _INT, _INT)),
    "pp_pack_stored": (None, (_POINTER, _INT, _INT, _INT, _POINTER, _INT, _POINTER)),
    "pp_pack_floats": (None, (_POINTER, _INT, _INT, _INT, _INT, _POINTER)),
    "pp_linear": (
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
}


class Library:
    """One loaded variant. `quick` functions keep Python's lock (for calls of microseconds), `long`
    ones release it.
    """

    def __init__(self, variant: str, path: Path) -> None:
        self.variant = variant
        self.quick = _bind(ctypes.PyDLL(str(path)))
        self.long = _bind(ctypes.CDLL(str(path)))

    def functions(self, rows: int) -> dict[str, Callable[..., int]]:
        """The binding that fits a batch of `rows` rows."""
        return self.quick if rows <= QUICK_ROWS else self.long


# up to here a call takes microseconds, and giving up Python's lock costs more than it
QUICK_ROWS = 8


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
