"""Writes GGUF files for benchmarks: metadata as plain values, tensors as raw blocks. Uses the
`gguf` package of the `dev` extra.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np


class GgufOut:
    """A file in the making; `close` writes it."""

    def __init__(self, path: Path, architecture: str, metadata: Mapping[str, Any]) -> None:
        self._writer = gguf.GGUFWriter(str(path), architecture)
        for key, value in metadata.items():
            if key != "general.architecture":  # the writer has put it there
                self._add_key(key, value)

    def add(self, name: str, type_name: str, shape: tuple[int, ...], data: np.ndarray) -> None:
        """A tensor of `shape` (rows first) whose `data` are its blocks as uint8, or floats."""
        kind = gguf.GGMLQuantizationType[type_name]
        if data.dtype == np.uint8:
            data = data.reshape(shape[0], -1)
        self._writer.add_tensor(name, data, raw_dtype=kind)

    def close(self) -> None:
        """Write header, metadata and tensors."""
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_tensors_to_file()
        self._writer.close()

    def _add_key(self, key: str, value: Any) -> None:  # Any: what GGUF metadata may hold
        if isinstance(value, bool):
            self._writer.add_bool(key, value)
        elif isinstance(value, int):
            self._writer.add_uint32(key, value)
        elif isinstance(value, float):
            self._writer.add_float32(key, value)
        elif isinstance(value, str):
            self._writer.add_string(key, value)
        else:
            self._writer.add_array(key, value)


def quantize(values: np.ndarray, type_name: str) -> np.ndarray:
    """Blocks (uint8) of a float matrix, rounded as llama.cpp's own tools do."""
    kind = gguf.GGMLQuantizationType[type_name]
    return gguf.quants.quantize(np.ascontiguousarray(values, dtype=np.float32), kind)
