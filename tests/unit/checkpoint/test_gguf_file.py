"""Broken GGUF files are one sentence that names the file; whole ones open fast."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import pytest

from polypath.runtime.checkpoint.gguf_file import GgufFile
from polypath.runtime.checkpoint.source import open_checkpoint
from polypath.runtime.errors import ModelError
from polypath.tests import tiny_models
from polypath.tests.unit.checkpoint.gguf_bytes import header, string, tensor_info, value

BROKEN = {
    "empty": (b"", "is empty"),
    "wrong magic": (b"PK\x03\x04" + bytes(60), "starts with"),
    "version": (header(0, 0, version=9), "version is 9"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version is 50331648"),
    "cut header": (header(3, 2)[:11], "ends in the middle"),
    "cut keys": (header(0, 2) + string("a"), "ends in the middle"),
    "many keys": (header(0, 1 << 60), "claims 1152921504606846976 metadata entries"),
    "many tensors": (header(1 << 60, 0), "tensors"),
    "long string": (header(0, 1) + struct.pack("<Q", 1 << 62) + b"abc", "past the end"),
    "value type": (header(0, 1) + string("k") + struct.pack("<I", 77), "unknown value type 77"),
    "array size": (
        header(0, 1) + string("k") + struct.pack("<IIQ", 9, 5, 1 << 50),
        "elements of 'k'",
    ),
    "cut array": (header(0, 1) + string("k") + struct.pack("<IIQ", 9, 5, 1000), "in the middle"),
    "not UTF-8": (header(0, 1) + struct.pack("<Q", 2) + b"\xff\xfe", "not UTF-8"),
    "no dimensions": (header(1, 0) + string("t") + struct.pack("<I", 0), "0 dimensions"),
    "huge tensor": (header(1, 0) + tensor_info("t", (1 << 40, 1 << 20)), "runs past its end"),
    "far tensor": (header(1, 0) + tensor_info("t", (1,), offset=1 << 63), "runs past its end"),
    "twice": (header(2, 0) + tensor_info("t", (1,)) * 2 + bytes(256), "twice"),
    "block": (header(1, 0) + tensor_info("t", (33,), 8) + bytes(256), "rows of 33 elements"),
    "alignment": (header(0, 1) + string("general.alignment") + value(33), "no power of two"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_one_sentence_that_names_it(name: str, tmp_path: Path) -> None:
    content, found = BROKEN[name]
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=found) as caught:
        GgufFile(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    tiny_models.random(tmp_path / "model", layers=1)
    tiny_models.to_gguf(tmp_path / "model", tmp_path / "whole.gguf", "Q8_0")
    whole = (tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(1, 400, 7), len(whole) // 4, len(whole) // 2, len(whole) - 64]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError):
            open_checkpoint(str(cut))


def test_the_default_model_opens_with_its_tokenizer_in_a_second(default_model_path: Path) -> None:
    best = min(_opening_seconds(default_model_path) for _ in range(3))
    assert best < 1.0


def _opening_seconds(path: Path) -> float:
    start = time.perf_counter()
    open_checkpoint(str(path)).tokenizer()
    return time.perf_counter() - start
