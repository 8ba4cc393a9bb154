"""Token ids to text as they arrive: no half characters, no beginning of a stop string before it is
decided.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from .stop_strings import StopMatcher

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
MAX_WINDOW = 32  # tokens a window may hold before its text is given out even if it ends in U+FFFD


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What a push gives: new text, the stop string that ended it, and how many of the pushed tokens
    count.

    `num_tokens_used` are the tokens up to the one that completed the stop string, itself included;
    without one, all.
    """

    text: str
    stopped_by: str | None = None
    num_tokens_used: int = 0


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text of one token within a whole text: a character split over tokens belongs to the one that
    completes it.
    """

    text: str
    offset: int  # characters before it


class IncrementalDetokenizer:
    """Text of one answer. Joined deltas equal the decoded whole, cut at the first stop string.

    One exception: of a run of SentencePiece byte tokens that turns out invalid, characters given
    out before stay.
    `continues`: the text goes on from a prompt, so that a blank in front of the first word stays.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        continues: bool = False,
    ) -> None:
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._stream = _stream(tokenizer, continues)
        self._stops = StopMatcher(stop, include_stop=include_stop)
        self._is_stopped = False

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Text that these tokens make certain. After a stop string more tokens give nothing."""
        if self._is_stopped:
            return TextDelta("")
        texts: list[str] = []
        for number, token_id in enumerate(token_ids):
            if token_id in self._skipped:
                continue
            text, stopped_by = self._stops.push(self._stream.push(token_id))
            texts.append(text)
            if stopped_by is not None:
                self._is_stopped = True
                return TextDelta("".join(texts), stopped_by, number + 1)
        return TextDelta("".join(texts), None, len(token_ids))

    def finish(self) -> TextDelta:
        """What was held back; half characters become U+FFFD."""
        if self._is_stopped:
            return TextDelta("")
        text, stopped_by = self._stops.push(self._stream.finish())
        self._is_stopped = True
        return TextDelta(
            text if stopped_by is not None else text + self._stops.finish(), stopped_by
        )


def text_pieces(
    tokenizer: Tokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool = False
) -> list[TextPiece]:
    """Text and place of each token; joined they are the decoded whole (half characters at its end
    go to the last).
    """
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    texts = [detokenizer.push([token_id]).text for token_id in token_ids]
    if texts:
        texts[-1] += detokenizer.finish().text
    pieces, offset = [], 0
    for text in texts:
        pieces.append(TextPiece(text, offset))
        offset += len(text)
    return pieces


class _Stream(Protocol):
    """Tokens to text, one at a time; only what later tokens cannot change."""

    def push(self, token_id: int) -> str: ...
    def finish(self) -> str: ...


def _stream(tokenizer: Tokenizer, continues: bool) -> _Stream:
    if tokenizer.kind.spelling == "byte_level":
        return _ByteStream(tokenizer)
    if tokenizer.kind.spelling == "sentencepiece":
        return _SentencePieceStream(tokenizer, 0 if continues else tokenizer.kind.strip_left)
    return _WindowStream(tokenizer)


class _ByteStream:
    """Byte-level vocabularies: bytes of all tokens in a row, read as UTF-8."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _SentencePieceStream:
    """SentencePiece vocabularies: whole characters, and byte tokens for the rare ones (one U+FFFD
    per wrong byte).
    """

    def __init__(self, tokenizer: Tokenizer, strip_left: int) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._byte_tokens = tokenizer.is_byte_token
        self._pending = b""
        self._strip_left = strip_left

    def push(self, token_id: int) -> str:
        if token_id not in self._byte_tokens:
            return self._stripped(self._flush() + self._token_bytes(token_id).decode())
        self._pending += self._token_bytes(token_id)
        try:
            text = self._pending.decode()
        except UnicodeDecodeError as error:
            return "" if error.reason == "unexpected end of data" else self._stripped(self._flush())
        self._pending = b""
        return self._stripped(text)

    def finish(self) -> str:
        return self._stripped(self._flush())

    def _flush(self) -> str:
        num_bytes, self._pending = len(self._pending), b""
        return REPLACEMENT * num_bytes

    def _stripped(self, text: str) -> str:
        while self._strip_left and text:
            if not text.startswith(" "):
                self._strip_left = 0
                break
            text, self._strip_left = text[1:], self._strip_left - 1
        return text


class _WindowStream:
    """Any other vocabulary: decode a window of the last tokens with the tokenizer's own decoder
    and give what is new.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_given = 0  # tokens at the window's start whose text was given out

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        before = self._decode(self._window[: self._num_given])
        whole = self._decode(self._window)
        held = len(self._window) - self._num_given
        if whole.endswith(REPLACEMENT) and held < MAX_WINDOW:
            return ""
        if len(whole) <= len(before):
            return ""
        self._window = self._window[self._num_given :]
        self._num_given = len(self._window)
        return whole[len(before) :]

    def finish(self) -> str:
        before = self._decode(self._window[: self._num_given])
        return self._decode(self._window)[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
