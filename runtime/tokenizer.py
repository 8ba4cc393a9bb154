"""Text to token ids and back, on Hugging Face's `tokenizers`; one object for models from folders
and from GGUF files.

Three ways to read control words such as `<|im_end|>`: as tokens (`encode`), as plain characters
(`parse_special=False`), and
as tokens only where they were not typed by a user (`protect` what users wrote, then
`encode_protected` the rendered chat).
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from .pieces import PieceKind, piece_bytes, read_piece_kind

if TYPE_CHECKING:
    import tokenizers

MAX_ID = 1 << 32  # what `tokenizers` numbers tokens with


class Tokenizer:
    """A tokenizer with what a server must know about it.

    `special_tokens`: texts by role (`bos_token`, `eos_token` ...), as chat templates see them.
    `eos_ids` end an answer.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_ids: Iterable[int] = (),
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.bos_id = self._id_of("bos_token")
        own_eos = self._id_of("eos_token")
        self.eos_ids = tuple(dict.fromkeys([*eos_ids, *([] if own_eos is None else [own_eos])]))
        self.adds_bos = self.bos_id is not None and backend.encode("").ids[:1] == [self.bos_id]
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.special_texts = frozenset(added[i].content for i in self.special_ids)
        self.added_texts = frozenset(token.content for token in added.values())
        self._patterns: dict[frozenset[str], re.Pattern[str]] = {}
        self._plain_lock = threading.Lock()
        self._plain: _PlainReader | None = None
        self._bytes: dict[int, bytes] = {}  # of tokens met so far: all of them take 0.2 s

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Ids of a text. With `parse_special` False control words are plain characters.

        A text that already begins with the first token gets no second one, even where transformers
        would add it.
        """
        text = without_lone_surrogates(text)
        if not parse_special:
            return self._plain_reader().encode(text, add_special_tokens)
        ids = _encode(self._backend, text, add_special_tokens)
        if self.adds_bos and add_special_tokens and ids[:2] == [self.bos_id, self.bos_id]:
            del ids[0]
        return ids

    def protect(self, text: str, words: frozenset[str] | None = None) -> str:
        """Hide control words in a user's text so that `encode_protected` reads them as plain
        characters.

        `words` are the ones to hide, by default the special tokens.
        """
        used = self.special_texts if words is None else words
        if used not in self._patterns:
            self._patterns[used] = _any_of(sorted(used, key=len, reverse=True))
        pattern = self._patterns[used]
        return self._plain_reader().protect(text, pattern) if pattern.search(text) else text

    def encode_protected(self, text: str) -> list[int]:
        """Ids of a text whose users' parts went through `protect`; nothing is added in front or
        behind.
        """
        return self._plain_reader().encode_protected(without_lone_surrogates(text))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids; half characters become U+FFFD, ids beyond the vocabulary nothing."""
        known = [i for i in ids if 0 <= i < self.vocab_size]
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Text of one token on its own; half characters become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of text that one token stands for; none for ids beyond the vocabulary."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._backend.id_to_token(token_id) if 0 <= token_id < MAX_ID else None
            known = self._bytes[token_id] = b"" if token is None else piece_bytes(self.kind, token)
        return known

    @cached_property
    def vocab_size(self) -> int:
        """Ids go from 0 to this minus 1; the model's embedding may have more rows."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def normalizes(self) -> bool:
        """Whether texts are changed before they are split, so that they may get shorter."""
        return self._backend.normalizer is not None

    @cached_property
    def kind(self) -> PieceKind:
        """How tokens spell bytes."""
        decoder = self._backend.decoder
        state = None if decoder is None else json.loads(decoder.__getstate__())
        return read_piece_kind(state)

    @cached_property
    def is_byte_token(self) -> frozenset[int]:
        """Ids of SentencePiece's byte tokens (`<0x0A>`), which stand for one byte each."""
        if not self.kind.has_byte_tokens:
            return frozenset()
        vocab = self._backend.get_vocab(with_added_tokens=False)
        names = (f"<0x{byte:02X}>" for byte in range(256))
        return frozenset(vocab[name] for name in names if name in vocab)

    def _id_of(self, role: str) -> int | None:
        text = self.special_tokens.get(role)
        return None if text is None else self._backend.token_to_id(text)

    def _plain_reader(self) -> _PlainReader:
        """Built at first use: it costs a copy of the tokenizer (0.2 s and some 20 MB for 49,152
        tokens).
        """
        with self._plain_lock:
            if self._plain is None:
                self._plain = _PlainReader(self._backend)
            return self._plain


class _PlainReader:
    """A copy of a tokenizer that sees no added token, unless it is wrapped in a secret word.

    Wrapped twins keep the flags of their originals, so text around them is read as usual. The
    secret is drawn anew in each
    process: nobody can type it.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        from tokenizers import AddedToken, Tokenizer

        self._secret = secrets.token_hex(12)
        added = backend.get_added_tokens_decoder()
        state = json.loads(backend.to_str())
        for entry in state.get("added_tokens") or []:
            entry["special"] = True
        self._backend = Tokenizer.from_str(json.dumps(state))
        self._backend.encode_special_tokens = True
        originals = list(added.items())
        twins = [
            AddedToken(
                self._wrap(token.content),
                special=False,
                normalized=token.normalized,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                single_word=token.single_word,
            )
            for _, token in originals
        ]
        self._backend.add_tokens(twins)
        self._original_ids = {
            self._backend.token_to_id(self._wrap(token.content)): token_id
            for token_id, token in originals
        }
        self._words = sorted((token.content for _, token in originals), key=len, reverse=True)
        self._numbers = {word: number for number, word in enumerate(self._words)}
        self._all = _any_of(self._words)
        self._hidden = re.compile(f"{self._secret}h([0-9]+){self._secret}")

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return _encode(self._backend, text, add_special_tokens)

    def protect(self, text: str, pattern: re.Pattern[str]) -> str:
        numbers = self._numbers
        return pattern.sub(lambda m: f"{self._secret}h{numbers[m[0]]}{self._secret}", text)

    def encode_protected(self, text: str) -> list[int]:
        wrapped = self._all.sub(lambda m: self._wrap(m[0]), text)
        shown = self._hidden.sub(lambda m: self._words[int(m[1])], wrapped)
        ids = _encode(self._backend, shown, False)
        return [self._original_ids.get(token_id, token_id) for token_id in ids]

    def _wrap(self, word: str) -> str:
        return f"{self._secret}w{word}{self._secret}"


def _encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """As a batch of one: `encode` itself holds the GIL, which would stop an event loop for seconds
    on a long text.
    """
    (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return encoding.ids


def _any_of(words: Sequence[str]) -> re.Pattern[str]:
    """Matches any of the words, longer ones first; without words nothing."""
    return re.compile("|".join(map(re.escape, words)) or "(?!)")


def without_lone_surrogates(text: str) -> str:
    """JSON can smuggle in halves of UTF-16 pairs, which no encoder takes; they become U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
