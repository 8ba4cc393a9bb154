"""Incremental text: joined deltas are the decoded whole, characters are never cut, stops end it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from polypath.runtime.checkpoint.gguf_file import GgufFile
from polypath.runtime.checkpoint.gguf_text import gguf_tokenizer
from polypath.runtime.checkpoint.source import default_model, open_checkpoint
from polypath.runtime.detokenizer import IncrementalDetokenizer, text_pieces
from polypath.runtime.tokenizer import Tokenizer
from polypath.tests.unit.checkpoint.gguf_bytes import write_metadata
from polypath.tests.unit.checkpoint.test_gguf_text import sentencepiece_metadata
from polypath.tests.unit.mixed_strings import mixed_strings

SMOLLM = open_checkpoint(default_model()).tokenizer()
BYTES = {SMOLLM.token_bytes(i): i for i in range(17, SMOLLM.vocab_size)}
TEXTS = mixed_strings(["<|im_end|>", "<|im_start|>"])


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = write_metadata(tmp_path_factory.mktemp("spm") / "m.gguf", sentencepiece_metadata())
    return gguf_tokenizer(GgufFile(path), (2,), 1 << 20)


def joined(tokenizer: Tokenizer, pushes: list[list[int]], *, skip: bool = True) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    return "".join(detokenizer.push(push).text for push in pushes) + detokenizer.finish().text


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=30), st.integers(1, 5), st.booleans())
def test_any_ids_in_any_cutting_equal_the_decoded_whole(
    ids: list[int], size: int, skip: bool
) -> None:
    pushes = [ids[at : at + size] for at in range(0, len(ids), size)]
    assert joined(SMOLLM, pushes, skip=skip) == SMOLLM.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=20))
def test_any_bytes_equal_the_decoded_whole(raw: bytes) -> None:
    ids = [BYTES[bytes([byte])] for byte in raw if bytes([byte]) in BYTES]
    assert joined(SMOLLM, [[i] for i in ids]) == SMOLLM.decode(ids)


@pytest.mark.parametrize("number", range(0, 200, 20))
def test_texts_come_back(number: int, sentencepiece: Tokenizer) -> None:
    for text in TEXTS[number : number + 20]:
        for tokenizer in (SMOLLM, sentencepiece):
            ids = tokenizer.encode(text)
            for skip in (True, False):
                whole = tokenizer.decode(ids, skip_special_tokens=skip)
                assert joined(tokenizer, [[i] for i in ids], skip=skip) == whole, text


def test_a_character_split_over_tokens_comes_out_whole() -> None:
    ids = SMOLLM.encode("🙂漢")
    assert len(ids) > 2
    detokenizer = IncrementalDetokenizer(SMOLLM)
    texts = [detokenizer.push([i]).text for i in ids]
    assert "\ufffd" not in "".join(texts)
    assert [text for text in texts if text] == ["🙂", "漢"]


def test_half_a_character_at_the_end_is_a_replacement_sign() -> None:
    detokenizer = IncrementalDetokenizer(SMOLLM)
    assert detokenizer.push(SMOLLM.encode("🙂")[:-1]).text == ""
    assert detokenizer.finish().text == "\ufffd"


def test_wrong_bytes_of_sentencepiece_equal_the_decoded_whole(sentencepiece: Tokenizer) -> None:
    first = 3  # ids of byte tokens begin here
    for raw in (b"\xe4", b"\xe4\xbd", b"\xe4A", b"\xff", b"\xe4\xbd\xa0", b"\xf0\x9f\x99\x82\xe4"):
        ids = [first + byte for byte in raw]
        if raw != b"\xf0\x9f\x99\x82\xe4":
            assert joined(sentencepiece, [[i] for i in ids]) == sentencepiece.decode(ids), raw
        else:  # the emoji is out before the run turns out wrong
            assert joined(sentencepiece, [[i] for i in ids]) == "🙂\ufffd"


def test_a_text_that_continues_keeps_its_first_blank(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("the the", add_special_tokens=False)
    assert joined(sentencepiece, [ids]) == "the the"
    going_on = IncrementalDetokenizer(sentencepiece, continues=True)
    assert going_on.push(ids).text == " the the"


def test_other_decoders_are_read_through_a_window() -> None:
    vocab = {"hello": 0, "##ing": 1, "world": 2, "##s": 3, "[UNK]": 4}
    backend = Backend(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = Tokenizer(backend)
    assert tokenizer.kind.spelling == "other"
    for ids in ([0, 1, 2, 3], [0], [2, 0, 1], [0, 1] * 50):
        assert joined(tokenizer, [[i] for i in ids]) == tokenizer.decode(ids)


def test_a_stop_string_ends_the_text_and_counts_the_tokens() -> None:
    ids = SMOLLM.encode("One two three four five")
    detokenizer = IncrementalDetokenizer(SMOLLM, stop=[" thr"])
    delta = detokenizer.push(ids)
    assert (delta.text, delta.stopped_by) == ("One two", " thr")
    assert SMOLLM.decode(ids[: delta.num_tokens_used]) == "One two three"
    assert detokenizer.push(ids).text == ""
    assert detokenizer.finish().text == ""


def test_a_stop_string_is_found_across_tokens() -> None:
    detokenizer = IncrementalDetokenizer(SMOLLM, stop=["o th"])
    deltas = [detokenizer.push([i]) for i in SMOLLM.encode("two three")]
    assert "".join(delta.text for delta in deltas) == "tw"
    assert deltas[-1].stopped_by == "o th"


def test_a_stop_string_may_complete_in_the_last_half_character() -> None:
    detokenizer = IncrementalDetokenizer(SMOLLM, stop=["a\ufffd"])
    text = detokenizer.push([*SMOLLM.encode("ba"), *SMOLLM.encode("🙂")[:-1]]).text
    last = detokenizer.finish()
    assert (text + last.text, last.stopped_by) == ("b", "a\ufffd")


def test_what_could_begin_a_stop_is_given_out_at_the_end() -> None:
    detokenizer = IncrementalDetokenizer(SMOLLM, stop=["END OF"])
    first = detokenizer.push(SMOLLM.encode("x EN")).text
    assert first + detokenizer.finish().text == "x EN"
    assert not first.endswith("EN")


def test_special_tokens_are_text_only_on_request() -> None:
    ids = SMOLLM.encode("a<|im_end|>b")
    assert joined(SMOLLM, [ids]) == "ab"
    assert joined(SMOLLM, [ids], skip=False) == "a<|im_end|>b"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=20))
def test_pieces_joined_are_the_whole_and_offsets_count_it(ids: list[int]) -> None:
    pieces = text_pieces(SMOLLM, ids)
    whole = "".join(piece.text for piece in pieces)
    assert whole == SMOLLM.decode(ids, skip_special_tokens=False)
    for piece in pieces:
        assert whole[piece.offset :].startswith(piece.text)


def test_a_long_answer_is_linear() -> None:
    ids = SMOLLM.encode("word 🙂 " * 20_000)
    start = time.perf_counter()
    detokenizer = IncrementalDetokenizer(SMOLLM, stop=["never said"])
    for token_id in ids:
        detokenizer.push([token_id])
    assert time.perf_counter() - start < 5.0
