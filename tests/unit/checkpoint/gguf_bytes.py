"""Writes GGUF files field by field, also wrong ones, faster than the gguf package does for large
vocabularies.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def string(text: str) -> bytes:
    """A string as the format spells it."""
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """A metadata value with its type in front."""
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, str):
        return struct.pack("<I", 8) + string(item)
    assert isinstance(item, list)
    kind, pack = {str: (8, string), float: (6, lambda x: struct.pack("<f", x))}.get(
        type(item[0]) if item else str, (5, lambda x: struct.pack("<i", x))
    )
    return struct.pack("<IIQ", 9, kind, len(item)) + b"".join(map(pack, item))


def header(num_tensors: int, num_keys: int, *, magic: bytes = b"GGUF", version: int = 3) -> bytes:
    """The first 24 bytes."""
    return magic + struct.pack("<IQQ", version, num_tensors, num_keys)


def tensor_info(name: str, dims: tuple[int, ...], type_number: int = 0, offset: int = 0) -> bytes:
    """One row of the table of tensors; `dims` in the file's order (columns first)."""
    sizes = struct.pack(f"<{len(dims)}Q", *dims)
    return (
        string(name)
        + struct.pack("<I", len(dims))
        + sizes
        + struct.pack("<IQ", type_number, offset)
    )


def write_metadata(path: Path, metadata: Mapping[str, Any]) -> Path:
    """A GGUF with metadata and no tensors."""
    entries = b"".join(string(key) + value(item) for key, item in metadata.items())
    path.write_bytes(header(0, len(metadata)) + entries)
    return path
