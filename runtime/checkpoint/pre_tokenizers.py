"""The pre-tokenizers that GGUF files name (`tokenizer.ggml.pre`): how text is cut before merges,
and what else the name
implies. Regular expressions are those of the models' own tokenizer.json files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

ASSUMED = "gpt-2"  # when a file names none, as transformers does

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreTokenizer:
    """`pattern` None is GPT-2's own rule. `adds_bos`: what holds when the file does not say."""

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


_GPT2 = PreTokenizer()
_DIGITS = PreTokenizer(single_digits=True)
_LLAMA3_RULE = PreTokenizer(pattern=_LLAMA3, ignore_merges=True, adds_bos=True)
PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "default": _GPT2,
    "phi-2": _GPT2,
    "olmo": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "codeshell": _DIGITS,
    "llama-bpe": _LLAMA3_RULE,
    "llama3": _LLAMA3_RULE,
    "llama-v3": _LLAMA3_RULE,
    "qwen2": PreTokenizer(pattern=_QWEN2, nfc=True),
    "deepseek-r1-qwen": PreTokenizer(pattern=_QWEN2),
    "tekken": PreTokenizer(pattern=_TEKKEN, ignore_merges=True, adds_bos=True),
}


def apply_pre_tokenizer(backend: tokenizers.Tokenizer, rule: PreTokenizer) -> None:
    """Sets normalizer and pre-tokenizer of a byte-level tokenizer."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    steps: list[pre_tokenizers.PreTokenizer] = []
    if rule.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if rule.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(rule.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.pattern is None))
    # pyright: ignore[reportAttributeAccessIssue]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if rule.nfc:
        backend.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
