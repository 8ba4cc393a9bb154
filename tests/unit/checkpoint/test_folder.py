"""Hugging Face folders: whole ones are read, sharded too; broken ones are one sentence."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from polypath.runtime.checkpoint.source import open_checkpoint
from polypath.runtime.errors import ModelError
from polypath.tests import tiny_models


def test_a_sharded_folder_reads_as_the_whole_one(tmp_path: Path) -> None:
    tiny_models.family(tmp_path / "whole", "qwen3")
    tiny_models.family(tmp_path / "shards", "qwen3", max_shard_size="200KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    whole, shards = (
        open_checkpoint(str(tmp_path / "whole")),
        open_checkpoint(str(tmp_path / "shards")),
    )
    assert whole.tensor_names() == shards.tensor_names()
    for name in whole.tensor_names():
        assert torch.equal(whole.read(name), shards.read(name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_come_in_their_stored_type(dtype: torch.dtype, tmp_path: Path) -> None:
    tiny_models.family(tmp_path, "llama", dtype=dtype)
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.read("model.norm.weight").dtype == dtype
    assert checkpoint.config.stored_dtype == str(dtype).removeprefix("torch.")
    assert checkpoint.config.weight_bytes == checkpoint.config.num_parameters * dtype.itemsize


def test_opening_imports_no_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    tiny_models.random(tmp_path)
    code = (
        "import sys; from polypath.runtime.checkpoint.source import open_checkpoint;"
        f"open_checkpoint({str(tmp_path)!r}); open_checkpoint('');"
        "heavy = {'torch', 'gguf', 'transformers', 'tokenizers', 'huggingface_hub'};"
        "assert not heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_dry_run_needs_the_config_only(tmp_path: Path) -> None:
    tiny_models.random(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    checkpoint = open_checkpoint(str(tmp_path), weights=False)
    assert checkpoint.config.weight_bytes == checkpoint.config.num_parameters * 4
    assert checkpoint.tensor_names() == frozenset()


def test_a_tied_model_has_no_output_layer(tmp_path: Path) -> None:
    tiny_models.family(tmp_path, "qwen2", tie_word_embeddings=True)
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.config.tie_word_embeddings and not checkpoint.has("lm_head.weight")


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a folder's one file."""
    file = folder / "model.safetensors"
    tensors = load_file(str(file))
    change(tensors)
    save_file(tensors, str(file))


def replace_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(7)


def add_bias(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(128)


def make_integers(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(128, dtype=torch.int8)


TENSORS = {
    "missing": (lambda tensors: tensors.pop("model.norm.weight"), "lacks 1 of 12.*model.norm"),
    "no head": (lambda tensors: tensors.pop("lm_head.weight"), "lm_head.weight"),
    "shape": (replace_shape, r"model.norm.weight has the shape \[7\].*\[128\]"),
    "unused bias": (add_bias, "q_proj.bias, which a LlamaForCausalLM of this config does not use"),
    "integers": (make_integers, "type I8; F32, F16, BF16"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_do_not_fit_the_config_are_refused(name: str, tmp_path: Path) -> None:
    change, found = TENSORS[name]
    tiny_models.random(tmp_path, layers=1)
    rewrite(tmp_path, change)
    with pytest.raises(ModelError, match=found):
        open_checkpoint(str(tmp_path))


def test_tensors_of_no_layer_are_ignored_and_said(tmp_path: Path) -> None:
    tiny_models.random(tmp_path, layers=1)
    rewrite(tmp_path, lambda tensors: tensors.update({"vision.weight": torch.ones(1)}))
    facts = open_checkpoint(str(tmp_path)).text_facts
    assert any("1 tensors" in fact and "vision.weight" in fact for fact in facts)


def header(entries: object) -> bytes:
    raw = json.dumps(entries).encode()
    return struct.pack("<Q", len(raw)) + raw


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
FILES = {
    "empty": (b"", "0 bytes"),
    "short": (b"abc", "3 bytes"),
    "huge header": (struct.pack("<Q", 1 << 60) + b"{}", "claims"),
    "no JSON": (struct.pack("<Q", 4) + b"@@@@", "not JSON"),
    "a list": (header([1]), "no JSON object"),
    "cut": (header({"a": ENTRY}) + bytes(4), "the file was cut"),
    "offsets": (header({"a": ENTRY | {"data_offsets": [8, 0]}}) + bytes(8), "has the place"),
    "entry": (header({"a": {"dtype": "F32"}}), "describes tensor a wrongly"),
    "nested": (struct.pack("<Q", 100_000) + b"[" * 100_000, "not JSON"),
    "html": (b"<!DOCTYPE html><html>Not found</html>", "claims"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_broken_weight_file_is_one_sentence_that_names_it(name: str, tmp_path: Path) -> None:
    content, found = FILES[name]
    tiny_models.random(tmp_path, layers=1)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=found) as caught:
        open_checkpoint(str(tmp_path))
    assert str(tmp_path / "model.safetensors") in str(caught.value)


def test_pickled_weights_are_never_loaded(tmp_path: Path) -> None:
    tiny_models.random(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(ModelError, match=r"pickled weights only \(pytorch_model.bin\)"):
        open_checkpoint(str(tmp_path))
    with pytest.raises(ModelError, match="is pickled"):
        open_checkpoint(str(tmp_path / "pytorch_model.bin"))


def test_missing_weights_are_said(tmp_path: Path) -> None:
    tiny_models.random(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no weights.*finish the download"):
        open_checkpoint(str(tmp_path))


INDEXES = {
    "no map": ({}, "has no weight_map"),
    "outside": ({"weight_map": {"a": "../x.safetensors"}}, "must lie beside"),
    "missing shard": ({"weight_map": {"a": "gone.safetensors"}}, "gone.safetensors cannot be read"),
    "missing tensor": ({"weight_map": {"a": "model.safetensors"}}, "lacks the tensor a"),
}


@pytest.mark.parametrize("name", INDEXES)
def test_a_broken_index_is_one_sentence(name: str, tmp_path: Path) -> None:
    index, found = INDEXES[name]
    tiny_models.random(tmp_path, layers=1)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=found):
        open_checkpoint(str(tmp_path))


JSON = {
    "cut": ("{", "is not JSON"),
    "list": ("[]", "must hold a JSON object"),
    "bytes": ("\udcff", "is not JSON"),
    "deep": ("[" * 200_000, "is not JSON"),
}


@pytest.mark.parametrize("name", JSON)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_broken_json_names_its_file(file: str, name: str, tmp_path: Path) -> None:
    content, found = JSON[name]
    tiny_models.random(tmp_path, layers=1)
    (tmp_path / file).write_text(content, errors="surrogateescape")
    with pytest.raises(ModelError, match=found) as caught:
        open_checkpoint(str(tmp_path))
    assert str(tmp_path / file) in str(caught.value)


@pytest.mark.parametrize("content", ["", "{}", "{", '{"model": 5}'])
def test_a_broken_tokenizer_is_one_sentence(content: str, tmp_path: Path) -> None:
    tiny_models.random(tmp_path, layers=1)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer.json"):
        open_checkpoint(str(tmp_path)).tokenizer()


def test_a_folder_without_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config.json"):
        open_checkpoint(str(tmp_path))
