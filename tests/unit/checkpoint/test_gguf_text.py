"""A GGUF's own tokenizer: the ids of its Hugging Face twin, unknown rules refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polypath.runtime.checkpoint.gguf_file import GgufFile
from polypath.runtime.checkpoint.gguf_text import gguf_text_facts, gguf_tokenizer
from polypath.runtime.checkpoint.pre_tokenizers import PRE_TOKENIZERS
from polypath.runtime.checkpoint.source import open_checkpoint
from polypath.runtime.errors import ModelError
from polypath.runtime.tokenizer import Tokenizer
from polypath.tests import tiny_models
from polypath.tests.unit.checkpoint.gguf_bytes import write_metadata
from polypath.tests.unit.mixed_strings import mixed_strings

SIZE = 4096


@pytest.fixture(scope="module")
def smollm_metadata(default_model_path: Path) -> dict[str, Any]:
    """SmolLM2's vocabulary, cut to 4096 tokens: transformers needs 20 s for the whole one."""
    metadata = dict(GgufFile(default_model_path).metadata)
    tokens = metadata["tokenizer.ggml.tokens"][:SIZE]
    known = set(tokens)
    merges = [each.split(" ") for each in metadata["tokenizer.ggml.merges"]]
    kept = [f"{a} {b}" for a, b in merges if a + b in known and a in known and b in known]
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": kept}
    metadata["tokenizer.ggml.token_type"] = metadata["tokenizer.ggml.token_type"][:SIZE]
    return metadata


def changed(path: Path, metadata: dict[str, Any], **changes: Any) -> Tokenizer:
    """The tokenizer of a file with `tokenizer.ggml.` keys changed; None takes one away."""
    return gguf_tokenizer(GgufFile(changed_file(path, metadata, **changes)), (), 1 << 20)


def changed_file(path: Path, metadata: dict[str, Any], **changes: Any) -> Path:
    keys = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    kept = {key: value for key, value in (metadata | keys).items() if value is not None}
    return write_metadata(path / "changed.gguf", kept)


def transformers_twin(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


def test_smollm_ids_equal_its_hugging_face_folder(default_model_path: Path, tmp_path: Path) -> None:
    """The twin is built as the model's own tokenizer.json is: single digits, then GPT-2's rule."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    ours = open_checkpoint(str(default_model_path)).tokenizer()
    metadata = GgufFile(default_model_path).metadata
    tokens, pairs = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=[tuple(each.split(" ")) for each in pairs]))
    backend.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    words = sorted(ours.special_texts)
    backend.add_special_tokens([AddedToken(word, special=True) for word in words])
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend)
    for text in mixed_strings(words):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text


@pytest.mark.slow
def test_smollm_ids_equal_what_transformers_reads_from_the_file(default_model_path: Path) -> None:
    """But for digits: transformers 5.24 does not know the pre-tokenizer `smollm` and takes
    GPT-2's.
    """
    ours, theirs = (
        open_checkpoint(str(default_model_path)).tokenizer(),
        transformers_twin(default_model_path),
    )
    for text in mixed_strings(sorted(ours.special_texts)):
        if not any(character.isnumeric() for character in text):
            assert ours.encode(text) == theirs.encode(text), text


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken"])
def test_pre_tokenizers_split_as_transformers_does(
    pre: str, smollm_metadata: dict[str, Any], tmp_path: Path
) -> None:
    from unicodedata import is_normalized

    ours = changed(tmp_path, smollm_metadata, pre=pre, add_bos_token=False)
    theirs = transformers_twin(tmp_path / "changed.gguf")
    for text in mixed_strings(sorted(ours.special_texts)):
        if pre == "qwen2" and not is_normalized("NFC", text):
            continue  # transformers forgets Qwen2's normalizer here; its folder has it
        assert ours.encode(text) == theirs.encode(text), text


def test_qwen2_files_normalize_as_qwen2_folders_do(
    smollm_metadata: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import Qwen2Tokenizer

    ours = changed(tmp_path, smollm_metadata, pre="qwen2")
    tokens, pairs = (smollm_metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "merges"))
    theirs = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[tuple(each.split(" ")) for each in pairs],  # pyright: ignore[reportArgumentType]
    )
    for text in mixed_strings([]):
        assert ours.encode(text) == theirs.encode(text), text


def test_an_unknown_pre_tokenizer_is_refused_with_the_known_ones(
    smollm_metadata: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="'banana' is unknown") as caught:
        changed(tmp_path, smollm_metadata, pre="banana")
    assert all(name in str(caught.value) for name in PRE_TOKENIZERS)


def test_a_missing_pre_tokenizer_is_said(smollm_metadata: dict[str, Any], tmp_path: Path) -> None:
    file = GgufFile(changed_file(tmp_path, smollm_metadata, pre=None))
    assert gguf_text_facts(file) == ["pre-tokenizer: the file names none, gpt-2 is assumed"]
    assert gguf_tokenizer(file, (), SIZE).encode("12") == gguf_tokenizer(
        GgufFile(changed_file(tmp_path, smollm_metadata, pre="gpt-2")), (), 49152
    ).encode("12")


def test_user_defined_words_are_never_cut_up(
    smollm_metadata: dict[str, Any], tmp_path: Path
) -> None:
    tokens = [*smollm_metadata["tokenizer.ggml.tokens"], "<think>", "漢語"]
    types = [*smollm_metadata["tokenizer.ggml.token_type"], 4, 4]
    tokenizer = changed(tmp_path, smollm_metadata, tokens=tokens, token_type=types)
    assert tokenizer.encode("<think>") == [SIZE]
    assert tokenizer.encode("a漢語b")[1] == SIZE + 1
    assert not {SIZE, SIZE + 1} & tokenizer.special_ids
    assert tokenizer.decode([SIZE, SIZE + 1]) == "<think>漢語"


@pytest.mark.parametrize(("pre", "says", "added"), [
    ("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True),
    ("llama-bpe", False, False), ("qwen2", None, False),
])  # fmt: skip
def test_the_first_token_is_added_as_the_file_says(
    pre: str, says: bool | None, added: bool, tmp_path: Path
) -> None:
    tiny_models.random(tmp_path / "folder", layers=1)
    metadata = {} if says is None else {"tokenizer.ggml.add_bos_token": says}
    drop = ["tokenizer.ggml.add_bos_token"] if says is None else []
    tiny_models.to_gguf(
        tmp_path / "folder", tmp_path / "m.gguf", metadata=metadata, drop=drop, pre=pre
    )
    tokenizer = open_checkpoint(str(tmp_path / "m.gguf")).tokenizer()
    assert tokenizer.adds_bos is added
    assert tokenizer.encode("a") == ([0] if added else []) + [4 + ord("a")]
    assert tokenizer.encode("<s>a") == [0, 4 + ord("a")]


def test_the_folder_and_its_gguf_agree_on_every_text(tmp_path: Path) -> None:
    tiny_models.random(tmp_path / "folder", layers=1)
    tiny_models.to_gguf(tmp_path / "folder", tmp_path / "m.gguf", "Q8_0")
    folder = open_checkpoint(str(tmp_path / "folder")).tokenizer()
    twin = open_checkpoint(str(tmp_path / "m.gguf")).tokenizer()
    assert twin.special_texts == folder.special_texts
    for text in mixed_strings(tiny_models.SPECIALS):
        assert twin.encode(text) == folder.encode(text), text
        plain = twin.encode(text, parse_special=False)
        assert plain == folder.encode(text, parse_special=False), text


def sentencepiece_metadata() -> dict[str, Any]:
    """A small SentencePiece vocabulary: scores say what merges first."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3, *[6] * 256]
    scores = [0.0] * len(pieces)
    words = [
        "▁the",
        "▁he",
        "▁a",
        "he",
        "th",
        "the",
        "ing",
        "in",
        "▁▁",
        "▁▁▁▁",
        "er",
        "▁word",
        "or",
        "wor",
        "d▁",
    ]
    letters = sorted(set("▁abcdefghijklmnopqrstuvwxyz0123456789.,!'ABC字"))
    for rank, piece in enumerate([*words, *letters]):
        pieces.append(piece)
        types.append(1)
        scores.append(-float(rank))
    return {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def llama2_twin(metadata: dict[str, Any]) -> Any:
    """transformers' tokenizer over a tokenizer.json such as Llama 2's."""
    from tokenizers import AddedToken, decoders, models, normalizers, processors
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast
    from transformers.tokenization_utils_base import generate_merges

    tokens, scores = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores"))
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = generate_merges(vocab, dict(zip(tokens, scores, strict=True)))
    backend = Backend(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    parts: dict[str, Any] = {
        "normalizer": normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        ),
        "decoder": decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        ),
        "post_processor": processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        ),
    }
    for name, part in parts.items():
        setattr(backend, name, part)
    specials = ["<unk>", "<s>", "</s>"]
    backend.add_special_tokens([AddedToken(each, normalized=False) for each in specials])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_sentencepiece_ids_equal_the_models_own_folder(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata()
    path = write_metadata(tmp_path / "spm.gguf", metadata)
    ours, theirs = gguf_tokenizer(GgufFile(path), (2,), 1 << 20), llama2_twin(metadata)
    assert ours.adds_bos
    for text in mixed_strings(["</s>"]):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text


def test_sentencepiece_ids_equal_transformers_but_for_its_blanks(tmp_path: Path) -> None:
    path = write_metadata(tmp_path / "spm.gguf", sentencepiece_metadata())
    ours, theirs = gguf_tokenizer(GgufFile(path), (2,), 1 << 20), transformers_twin(path)
    for text in mixed_strings([]):
        if not text.startswith(" "):
            assert ours.encode(text) == theirs.encode(text), text


def test_sentencepiece_says_what_it_assumes(tmp_path: Path) -> None:
    path = write_metadata(tmp_path / "spm.gguf", sentencepiece_metadata())
    assert "in front of a text and after control words" in gguf_text_facts(GgufFile(path))[0]


WRONG = {
    "no tokens": ({"tokens": None}, "carries no tokenizer"),
    "model": ({"model": "t5"}, "'t5' is not supported"),
    "merge": ({"merges": ["ab"]}, "'ab' in tokenizer.ggml.merges is no pair"),
    "unknown merge": ({"merges": ["\u0123 \u0124xyz"]}, "does not fit together"),
    "eos": ({"eos_token_id": 50000}, "beyond its 4096 tokens"),
    "flag": ({"add_bos_token": "yes"}, "must be true or false"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_broken_tokenizer_is_one_sentence(
    name: str, smollm_metadata: dict[str, Any], tmp_path: Path
) -> None:
    changes, found = WRONG[name]
    with pytest.raises(ModelError, match=found) as caught:
        changed(tmp_path, smollm_metadata, **changes)
    assert str(tmp_path / "changed.gguf") in str(caught.value)
