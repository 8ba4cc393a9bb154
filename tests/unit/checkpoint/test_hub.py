"""Hub ids: whole snapshots need no network, broken ones say how to finish, nothing hangs."""

from __future__ import annotations

import shutil
import socket
import time
from pathlib import Path

import pytest

from polypath.runtime.checkpoint.source import open_checkpoint
from polypath.runtime.errors import ModelError
from polypath.tests import tiny_models

MODEL = "organisation/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache built by hand, laid out as the hub's own client does: blobs, refs, snapshots."""
    from huggingface_hub import close_session, constants

    tiny_models.random(tmp_path / "made", layers=1)
    repository = tmp_path / "cache" / "models--organisation--tiny"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (repository / "blobs", repository / "refs", snapshot):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for number, file in enumerate(sorted((tmp_path / "made").iterdir())):
        shutil.copy(file, repository / "blobs" / f"b{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/b{number}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    close_session()  # the client keeps the proxies it has once read
    return tmp_path / "cache"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any connection fails the test."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def snapshot_of(cache: Path) -> Path:
    return cache / "models--organisation--tiny" / "snapshots" / COMMIT


def test_a_whole_snapshot_starts_without_a_network_call(cache: Path, no_network: None) -> None:
    checkpoint = open_checkpoint(MODEL)
    assert checkpoint.name == MODEL
    assert checkpoint.text_facts[0].startswith(f"model: {MODEL} of the Hugging Face hub")
    assert checkpoint.read("model.norm.weight").shape == (128,)
    assert checkpoint.tokenizer().encode("a") == [4 + ord("a")]


def test_a_cache_behind_a_link_and_beside_other_snapshots_works(
    cache: Path, no_network: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    other = snapshot_of(cache).with_name("f" * 40)
    other.mkdir()
    (cache / "models--organisation--tiny" / "blobs" / "x.incomplete").touch()
    link = cache.with_name("link")
    link.symlink_to(cache)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(link))
    assert open_checkpoint(MODEL).has("lm_head.weight")


def test_without_a_reference_the_only_snapshot_counts(cache: Path, no_network: None) -> None:
    (cache / "models--organisation--tiny" / "refs" / "main").unlink()
    assert open_checkpoint(MODEL).has("lm_head.weight")


def test_a_snapshot_given_as_a_folder_is_served_under_its_id(cache: Path) -> None:
    assert open_checkpoint(str(snapshot_of(cache))).name == MODEL


def break_link(cache: Path, name: str) -> None:
    (snapshot_of(cache) / name).resolve().unlink()


def empty(cache: Path, name: str) -> None:
    (snapshot_of(cache) / name).resolve().write_bytes(b"")


def remove(cache: Path, name: str) -> None:
    (snapshot_of(cache) / name).unlink()


@pytest.mark.parametrize("damage", [break_link, empty, remove])
@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_broken_snapshot_offline_is_one_sentence(
    damage: object, file: str, cache: Path, offline: None, no_network: None
) -> None:
    assert callable(damage)
    damage(cache, file)
    start = time.monotonic()
    with pytest.raises(ModelError) as caught:
        open_checkpoint(MODEL)
    sentence = str(caught.value)
    assert f"hf download {MODEL}" in sentence
    assert file in sentence and str(snapshot_of(cache)) in sentence
    assert "\n" not in sentence and time.monotonic() - start < 5


def test_what_is_not_cached_offline_is_one_sentence(
    cache: Path, offline: None, no_network: None
) -> None:
    with pytest.raises(
        ModelError, match=r"no local folder or file and not in the hub cache.*OFFLINE"
    ):
        open_checkpoint("organisation/other")


def test_a_network_that_refuses_is_one_sentence(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    break_link(cache, "model.safetensors")
    start = time.monotonic()
    with pytest.raises(
        ModelError, match=r"no local folder or file, and .* cannot be reached"
    ) as caught:
        open_checkpoint(MODEL)
    assert "\n" not in str(caught.value) and f"hf download {MODEL}" in str(caught.value)
    assert time.monotonic() - start < 5


def test_a_network_that_never_answers_is_given_up(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{silent.getsockname()[1]}")
        start = time.monotonic()
        with pytest.raises(ModelError, match="cannot be reached"):
            open_checkpoint("organisation/other")
        assert time.monotonic() - start < 6


def test_a_local_folder_wins_over_a_hub_id(cache: Path, no_network: None) -> None:
    tiny_models.random(cache.parent / MODEL, layers=1)
    assert open_checkpoint(MODEL).name == "tiny"
