"""Models that benchmarks write: they load, and what is requantized stays close."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from polypath.runtime.checkpoint.gguf import GgufCheckpoint
from polypath.runtime.checkpoint.source import open_checkpoint
from polypath.tests import tiny_models

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    assert str(BENCHMARKS) in sys.path


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1"])
def test_random_weights_have_the_variance_of_fresh_ones(tmp_path: Path, type_name: str) -> None:
    import random_model

    path = tmp_path / "random.gguf"
    random_model.write(path, "tiny", type_name, seed=0)
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.config.stored_dtype == type_name
    assert checkpoint.config.tie_word_embeddings
    weight = checkpoint.read("model.layers.1.mlp.down_proj.weight").float()
    assert weight.shape == (128, 256)
    assert abs(float(weight.mean())) < 0.05 * 256**-0.5 + 0.5 * 256**-0.5 / 4.61
    assert float(weight.std()) == pytest.approx(256**-0.5, rel=0.05)
    assert checkpoint.tokenizer().encode("Hello")


def test_a_requantized_file_holds_the_same_model(tmp_path: Path) -> None:
    import convert

    tiny_models.random(tmp_path / "model")
    tiny_models.to_gguf(tmp_path / "model", tmp_path / "f32.gguf")
    source = open_checkpoint(str(tmp_path / "f32.gguf"))
    assert isinstance(source, GgufCheckpoint)
    convert.to_gguf(source, tmp_path / "q8.gguf", "Q8_0")
    found = open_checkpoint(str(tmp_path / "q8.gguf"))
    assert found.tensor_names() == source.tensor_names()
    for name in source.tensor_names():
        distance = (found.read(name).float() - source.read(name).float()).abs().max()
        assert float(distance) <= float(source.read(name).float().abs().max()) / 127


def test_a_folder_made_of_a_gguf_holds_the_same_weights(tmp_path: Path) -> None:
    import convert

    tiny_models.random(tmp_path / "model")
    tiny_models.to_gguf(tmp_path / "model", tmp_path / "f32.gguf")
    source = open_checkpoint(str(tmp_path / "f32.gguf"))
    assert isinstance(source, GgufCheckpoint)
    convert.to_folder(source, tmp_path / "folder")
    found = open_checkpoint(str(tmp_path / "folder"))
    for name in source.tensor_names():
        assert found.read(name).equal(source.read(name).float())
    assert found.tokenizer().encode("Hello") == source.tokenizer().encode("Hello")
