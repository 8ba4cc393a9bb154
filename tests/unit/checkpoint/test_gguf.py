"""GGUF checkpoints: the same weights as their folders, and refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polypath.runtime.checkpoint import dequantize as dequantize_module
from polypath.runtime.checkpoint.dequantize import QUANTIZED, dequantize
from polypath.runtime.checkpoint.gguf import huggingface_name
from polypath.runtime.checkpoint.gguf_file import BLOCKS
from polypath.runtime.checkpoint.source import Checkpoint, open_checkpoint
from polypath.runtime.config import RopeConfig
from polypath.runtime.errors import ModelError
from polypath.tests import tiny_models

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
SAME = (
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "rope",
    "max_position",
    "qkv_bias",
    "qk_norm",
    "tie_word_embeddings",
    "layer_windows",
    "eos_ids",
)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def open_both(tmp_path: Path) -> tuple[Checkpoint, Checkpoint]:
    folder, twin = tmp_path / "folder", tmp_path / "twin.gguf"
    return open_checkpoint(str(folder)), open_checkpoint(str(twin))


@pytest.mark.parametrize("type_name", TYPES)
def test_dequantizes_bit_for_bit_as_the_gguf_package(type_name: str) -> None:
    import gguf

    values = np.random.default_rng(1).normal(size=(96, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[type_name]
    stored = gguf.quants.quantize(values, kind)
    ours = dequantize(memoryview(stored.tobytes()), type_name, values.shape)
    assert np.array_equal(ours.float().numpy(), gguf.quants.dequantize(stored, kind))


@pytest.mark.parametrize("type_name", QUANTIZED)
def test_dequantizes_every_byte_pattern_as_the_gguf_package(
    type_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gguf

    monkeypatch.setattr(dequantize_module, "AT_ONCE", 5)
    _, size = BLOCKS[type_name]
    raw = np.random.default_rng(2).integers(0, 256, size=(64, 7 * size), dtype=np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):  # random scales include infinities
        theirs = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type_name])
    ours = dequantize(memoryview(raw.tobytes()), type_name, theirs.shape)
    assert np.array_equal(ours.numpy(), theirs, equal_nan=True)


@pytest.mark.parametrize("family", tiny_models.FAMILY_CLASSES)
def test_every_family_reads_the_same_from_gguf_and_folder(family: str, tmp_path: Path) -> None:
    tiny_models.family(tmp_path / "folder", family)
    tiny_models.to_gguf(tmp_path / "folder", tmp_path / "twin.gguf", "F32")
    folder, twin = open_both(tmp_path)
    assert twin.tensor_names() == folder.tensor_names()
    for name in folder.tensor_names():
        assert torch.equal(twin.read(name), folder.read(name)), name
    for key in SAME:
        assert getattr(twin.config, key) == getattr(folder.config, key), key
    assert twin.config.rms_norm_eps == pytest.approx(folder.config.rms_norm_eps)


def test_biases_of_a_permuted_architecture_are_put_back_in_order(tmp_path: Path) -> None:
    tiny_models.family(tmp_path / "folder", "llama", attention_bias=True, mlp_bias=True)
    tiny_models.to_gguf(tmp_path / "folder", tmp_path / "twin.gguf")
    folder, twin = open_both(tmp_path)
    assert twin.config.qkv_bias and twin.config.o_bias and twin.config.mlp_bias
    for name in folder.tensor_names():
        assert torch.equal(twin.read(name), folder.read(name)), name


def test_a_file_without_output_layer_is_tied(tmp_path: Path) -> None:
    tiny_models.family(tmp_path / "folder", "qwen3", tie_word_embeddings=True)
    tiny_models.to_gguf(tmp_path / "folder", tmp_path / "twin.gguf")
    twin = open_checkpoint(str(tmp_path / "twin.gguf"))
    assert twin.config.tie_word_embeddings
    assert not twin.has("lm_head.weight")


def test_a_token_list_may_be_shorter_than_the_embedding(tmp_path: Path) -> None:
    tiny_models.random(tmp_path / "folder", rows=28)
    tiny_models.to_gguf(tmp_path / "folder", tmp_path / "twin.gguf", "Q8_0")
    twin = open_checkpoint(str(tmp_path / "twin.gguf"))
    assert (twin.config.vocab_size, twin.tokenizer().vocab_size) == (288, 260)
    assert twin.tokenizer().decode([4 + ord("a"), 287]) == "a"


@pytest.mark.parametrize(
    ("settings", "rope"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ("linear", 2.0, 0)),
        ({"rope_scaling": LLAMA3}, ("llama3", 8.0, 256)),
    ],
)
def test_rope_scaling_survives_the_way_through_gguf(
    settings: dict[str, Any], rope: tuple[str, float, int], tmp_path: Path
) -> None:
    tiny_models.random(tmp_path / "folder", config=settings)
    tiny_models.to_gguf(tmp_path / "folder", tmp_path / "twin.gguf")
    folder, twin = open_both(tmp_path)
    assert twin.config.rope == folder.config.rope
    assert (twin.config.rope.scaling, twin.config.rope.factor) == rope[:2]
    assert twin.config.rope.original_max_position == rope[2]
    assert any("does not widen" in fact for fact in twin.text_facts)


REFUSED = {
    "architecture": (
        {"general.architecture": "gemma3"},
        "'gemma3' is unknown.*llama, qwen2, qwen3",
    ),
    "yarn": ({"llama.rope.scaling.type": "yarn"}, "'yarn' is not supported"),
    "factor": (
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.5},
        "at least 1",
    ),
    "split": ({"split.count": 3}, "one of 3 parts"),
    "experts": ({"llama.expert_count": 8}, "mixture of experts"),
    "partial rotation": ({"llama.rope.dimension_count": 32}, "32 of 64 dimensions"),
    "value size": ({"llama.attention.value_length": 32}, "values 32"),
    "heads": ({"llama.attention.head_count": 3}, "shape"),
    "no blocks": ({"llama.block_count": 5}, "lacks"),
    "text": ({"llama.context_length": "long"}, "context_length is 'long'"),
    "tokenizer": ({"tokenizer.ggml.model": "bert"}, "'bert' is not supported"),
    "pre-tokenizer": ({"tokenizer.ggml.pre": "banana"}, "'banana' is unknown.*llama-bpe.*tekken"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_we_do_not_compute_is_refused_when_opening(name: str, tmp_path: Path) -> None:
    metadata, found = REFUSED[name]
    tiny_models.random(tmp_path / "folder", layers=1)
    path = tmp_path / "wrong.gguf"
    tiny_models.to_gguf(tmp_path / "folder", path, metadata=metadata)
    with pytest.raises(ModelError, match=found) as caught:
        open_checkpoint(str(path))
    assert str(path) in str(caught.value)


def test_a_type_that_we_cannot_read_is_refused_by_name(tmp_path: Path) -> None:
    tiny_models.random(tmp_path / "folder", layers=1, hidden=256)
    path = tmp_path / "wrong.gguf"
    tiny_models.to_gguf(tmp_path / "folder", path, lambda name, shape: _tq2_of(shape))
    with pytest.raises(ModelError, match=r"type TQ2_0.*F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0"):
        open_checkpoint(str(path))


def _tq2_of(shape: tuple[int, ...]) -> str:
    return "F32" if shape[-1] % 256 else "TQ2_0"


def test_a_file_of_k_types_reads_as_it_was_written(tmp_path: Path) -> None:
    """Mixed as llama.cpp mixes: v and the output layer in more bits, narrow rows in Q5_0."""
    tiny_models.random(tmp_path / "folder", hidden=256)
    tiny_models.to_gguf(tmp_path / "folder", tmp_path / "twin.gguf", tiny_models.q4_k_m)
    folder, twin = open_both(tmp_path)
    assert [kind for kind, _ in twin.config.stored_types] == ["Q4_K", "Q6_K", "Q5_0"]
    for name in folder.tensor_names():
        expected = folder.read(name)
        error = (twin.read(name) - expected).norm() / expected.norm()
        assert float(error) < 0.12, name


def test_every_declared_end_token_ends_an_answer(tmp_path: Path) -> None:
    tiny_models.random(tmp_path / "folder", layers=1)
    ends = {"tokenizer.ggml.eot_token_id": 2, "tokenizer.ggml.eom_token_id": 3}
    tiny_models.to_gguf(tmp_path / "folder", tmp_path / "twin.gguf", metadata=ends)
    twin = open_checkpoint(str(tmp_path / "twin.gguf"))
    assert twin.config.eos_ids == (1, 2, 3)
    assert twin.tokenizer().eos_ids == (1, 2, 3)


def test_the_default_model_is_what_it_says(default_model_path: Path) -> None:
    model = open_checkpoint("")
    assert (model.path, model.name) == (default_model_path, "SmolLM2-135M-Instruct")
    assert (model.config.stored_dtype, model.config.eos_ids) == ("Q4_1", (2,))
    assert model.config.rope == RopeConfig(theta=100_000.0)
    assert model.config.num_parameters == 134_515_008
    assert model.read("model.norm.weight").shape == (576,)


def test_names_of_all_tensors_are_mapped() -> None:
    assert (
        huggingface_name("blk.12.attn_k_norm.weight") == "model.layers.12.self_attn.k_norm.weight"
    )
    assert huggingface_name("output_norm.weight") == "model.norm.weight"
    assert huggingface_name("blk.1.strange.weight") == "model.layers.1.strange.weight"
    assert huggingface_name("strange") == "strange"
