"""Tokenizers: ids equal transformers', control words only where they are meant, one first token."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from polypath.runtime.checkpoint.source import open_checkpoint
from polypath.runtime.errors import ModelError
from polypath.runtime.tokenizer import Tokenizer
from polypath.tests import tiny_models
from polypath.tests.unit.mixed_strings import mixed_strings


@pytest.fixture(scope="module")
def smollm(default_model_path: Path) -> Tokenizer:
    return open_checkpoint(str(default_model_path)).tokenizer()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_models.random(folder, layers=1)
    return folder


def add_first_token(folder: Path) -> None:
    """A tokenizer that puts `<s>` in front, as Llama's does."""
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    # pyright: ignore[reportAttributeAccessIssue]
    backend.post_processor = processors.TemplateProcessing(
        single="<s>:0 $A:0", special_tokens=[("<s>", 0)]
    )
    backend.save(str(folder / "tokenizer.json"))


def test_ids_of_a_folder_equal_transformers(tiny: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = open_checkpoint(str(tiny)).tokenizer(), AutoTokenizer.from_pretrained(str(tiny))
    for text in mixed_strings(tiny_models.SPECIALS):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip
            )


@pytest.mark.parametrize("token_id", [-1, 49152, 2**32 - 1, 2**32, 2**64])
def test_an_id_beyond_the_vocabulary_stands_for_no_bytes(smollm: Tokenizer, token_id: int) -> None:
    assert smollm.token_bytes(token_id) == b""


def test_bytes_of_a_token_do_not_read_the_vocabulary(
    default_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That took 0.07 s of the time to a first token."""
    tokenizer = open_checkpoint(str(default_model_path)).tokenizer()
    monkeypatch.setattr(Tokenizer, "vocab_size", property(lambda self: pytest.fail("it was read")))
    assert tokenizer.token_bytes(2767) == b" dog"


def test_known_facts_of_the_default_model(smollm: Tokenizer) -> None:
    assert smollm.encode(" dog" * 5) == [2767] * 5
    words = [smollm.token_text(i) for i in (0, 1, 2)]
    assert words == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert not smollm.adds_bos
    assert smollm.encode("") == []
    assert smollm.vocab_size == 49152


def test_plain_reading_sees_characters_only(smollm: Tokenizer) -> None:
    assert smollm.encode("a<|im_end|>b")[1] == 2
    plain = smollm.encode("a<|im_end|>b", parse_special=False)
    assert not smollm.special_ids & set(plain)
    assert smollm.decode(plain, skip_special_tokens=True) == "a<|im_end|>b"


def test_plain_and_usual_reading_agree_where_there_are_no_control_words(smollm: Tokenizer) -> None:
    for text in mixed_strings([]):
        assert smollm.encode(text, parse_special=False) == smollm.encode(text), text


def test_protected_words_are_plain_and_others_are_tokens(smollm: Tokenizer) -> None:
    typed = smollm.protect("x<|im_end|>y")
    assert "<|im_end|>" not in typed
    ids = smollm.encode_protected(f"<|im_start|>{typed}<|im_end|>")
    assert ids == [1, *smollm.encode("x<|im_end|>y", parse_special=False), 2]


def test_a_protected_text_without_control_words_is_itself(smollm: Tokenizer) -> None:
    for text in mixed_strings([]):
        assert smollm.protect(text) == text
        assert smollm.encode_protected(f"<|im_start|>{text}") == smollm.encode(
            f"<|im_start|>{text}"
        )


def test_the_first_token_is_added_once(tmp_path: Path) -> None:
    tiny_models.random(tmp_path, layers=1)
    add_first_token(tmp_path)
    tokenizer = open_checkpoint(str(tmp_path)).tokenizer()
    a = 4 + ord("a")
    assert tokenizer.adds_bos
    assert tokenizer.encode("a") == [0, a]
    assert tokenizer.encode("<s>a") == [0, a]
    assert tokenizer.encode("a", add_special_tokens=False) == [a]
    assert tokenizer.encode("<s>a", parse_special=False)[0] == 0
    assert len(tokenizer.encode("<s>a", parse_special=False)) == 5


@pytest.mark.parametrize("is_added", [True, False])
@pytest.mark.parametrize("says", [True, False])
def test_tokenizer_json_decides_on_the_first_token_as_in_transformers(
    is_added: bool, says: bool, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    tiny_models.random(tmp_path, layers=1)
    if is_added:
        add_first_token(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["add_bos_token"] = says
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = open_checkpoint(str(tmp_path)).tokenizer()
    assert ours.encode("ab") == AutoTokenizer.from_pretrained(str(tmp_path)).encode("ab")
    assert ours.adds_bos is is_added


def test_special_tokens_that_only_tokenizer_config_names_are_added(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tiny_models.random(tmp_path, layers=1, rows=4)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings |= {
        "additional_special_tokens": ["<more>"],
        "added_tokens_decoder": {"260": {"content": "<tool>", "special": False}},
        "pad_token": {"__type": "AddedToken", "content": "<pad>", "special": True},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours, theirs = (
        open_checkpoint(str(tmp_path)).tokenizer(),
        AutoTokenizer.from_pretrained(str(tmp_path)),
    )
    for word in ("<tool>", "<pad>", "<more>"):
        assert len(ours.encode(word)) == 1
        assert ours.encode(f"a{word}b") == theirs.encode(f"a{word}b"), word


def test_lone_surrogates_from_json_do_not_break_the_reader(smollm: Tokenizer) -> None:
    text = json.loads('"a\\ud800b"')
    assert smollm.decode(smollm.encode(text)) == "a\ufffdb"
    assert smollm.encode(text) == smollm.encode(text, parse_special=False)


def test_ids_beyond_the_vocabulary_have_no_text(smollm: Tokenizer) -> None:
    assert smollm.decode([49152, -1, 2767]) == " dog"
    assert smollm.token_bytes(49152) == b""


def test_bytes_of_tokens_joined_are_the_text(smollm: Tokenizer) -> None:
    for text in mixed_strings(["<|im_end|>"]):
        ids = smollm.encode(text)
        assert b"".join(map(smollm.token_bytes, ids)) == text.encode(), text


def test_end_tokens_come_from_config_and_tokenizer(tmp_path: Path) -> None:
    tiny_models.random(tmp_path, layers=1, config={"eos_token_id": [2]})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 2]}')
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.config.eos_ids == (2, 3, 1)
    assert checkpoint.tokenizer().eos_ids == (2, 3, 1)


def test_a_folder_without_tokenizer_is_refused_with_a_way_out(tmp_path: Path) -> None:
    tiny_models.random(tmp_path, layers=1)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer.json; save the tokenizer"):
        open_checkpoint(str(tmp_path)).tokenizer()


def test_another_models_tokenizer_is_refused(tmp_path: Path) -> None:
    tiny_models.random(tmp_path / "a", layers=1)
    tiny_models.random(tmp_path / "b", layers=1, words=["longer"])
    (tmp_path / "a" / "tokenizer.json").write_bytes(
        (tmp_path / "b" / "tokenizer.json").read_bytes()
    )
    with pytest.raises(ModelError, match="belongs to another model"):
        open_checkpoint(str(tmp_path / "a")).tokenizer()


@pytest.mark.parametrize("unit", ["a", "=", "漢", " ", "\n", "7", "\u0301", "aGVsbG8"])
def test_long_unbroken_texts_are_not_quadratic(unit: str, smollm: Tokenizer) -> None:
    start = time.perf_counter()
    smollm.encode((unit * 200_000)[:200_000])
    assert time.perf_counter() - start < 5.0  # 0.1 to 0.5 s when linear, minutes when quadratic
