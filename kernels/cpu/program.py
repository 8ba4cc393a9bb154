"""A native program: kernel calls noted once and run again by one call, without Python between."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

from .library import QUICK_ROWS, ROWS_ARGUMENT, Library, argument_types


class Program:
    """Calls in the order in which they were added. `rows` of each is read when it runs."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._address = library.quick["pp_program_new"]()
        self._run_quick = library.quick["pp_program_run"]
        self._run_long = library.long["pp_program_run"]
        self._length = 0

    def __del__(self) -> None:
        self._library.quick["pp_program_free"](self._address)

    def __len__(self) -> int:
        return self._length

    @property
    def num_bytes(self) -> int:
        """Bytes of the noted calls."""
        num_bytes = self._library.quick["pp_program_bytes"](self._address)
        assert num_bytes is not None, "the function returns a number"
        return num_bytes

    def add(self, name: str, arguments: Sequence[Any]) -> None:  # ints, floats, None for null
        """Append one call; its number of rows is replaced at each run."""
        slots = (ctypes.c_int64 * len(arguments))(
            *(
                _slot(value, kind)
                for value, kind in zip(arguments, argument_types(name), strict=True)
            )
        )
        added = self._library.quick["pp_program_add"](
            self._address, name.encode(), slots, len(arguments), ROWS_ARGUMENT[name]
        )
        assert added, f"{name} with {len(arguments)} arguments cannot be captured"
        self._length += 1

    def run(self, first: int, last: int, rows: int) -> None:
        """Run calls first .. last - 1 over `rows` rows; other threads of Python go on meanwhile."""
        run = self._run_long if last - first > 1 or rows > QUICK_ROWS else self._run_quick
        run(self._address, first, last, rows)


def _slot(value: float | None, kind: object) -> int:
    """A pointer or integer as it is, a float as the bits of a double."""
    if kind is ctypes.c_float:
        assert value is not None, "a float argument has a value"
        return struct.unpack("<q", struct.pack("<d", value))[0]
    return 0 if value is None else int(value)
