"""The header of a safetensors file.

Names, types, shapes and places of its tensors, without importing torch.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelError

DTYPES = {"F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One tensor of a safetensors file."""

    file: Path
    name: str
    dtype: str  # as the file spells it: F32, F16, BF16 ...
    shape: tuple[int, ...]
    num_bytes: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """All tensors of the file by name.

    Raises ModelError when the file is missing, cut or no safetensors file.
    """
    header, body_bytes = _header(path)
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        tensors[name] = _entry(path, name, entry, body_bytes)
    return tensors


def _header(path: Path) -> tuple[dict[str, object], int]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            if len(start) < 8:
                raise _broken(path, f"it has {size} bytes")
            (length,) = struct.unpack("<Q", start)
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise _broken(path, f"its header claims {length} bytes of {size}")
            header = json.loads(file.read(length))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, ModelError):
            raise
        raise _broken(path, "its header is not JSON") from None
    if not isinstance(header, dict):
        raise _broken(path, "its header is no JSON object")
    return header, size - 8 - length


def _entry(path: Path, name: str, entry: object, body_bytes: int) -> StoredTensor:
    try:
        assert isinstance(entry, dict)
        begin, end = (int(each) for each in entry["data_offsets"])
        shape, dtype = tuple(int(dim) for dim in entry["shape"]), str(entry["dtype"])
    except (AssertionError, KeyError, TypeError, ValueError):
        raise _broken(path, f"its header describes tensor {name} wrongly") from None
    if not 0 <= begin <= end:
        raise _broken(path, f"tensor {name} has the place {begin} to {end}")
    if end > body_bytes:
        raise _broken(path, f"tensor {name} ends at byte {end} of {body_bytes}: the file was cut")
    return StoredTensor(file=path, name=name, dtype=dtype, shape=shape, num_bytes=end - begin)


def _broken(path: Path, why: str) -> ModelError:
    return ModelError(f"{path} is not a whole safetensors file: {why}; download it again.")
