"""How a tokenizer's vocabulary spells bytes: GPT-2's byte alphabet, SentencePiece's blanks and
byte tokens, or neither.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

BLANK = "\u2581"  # SentencePiece's visible blank
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceKind:
    """`strip_left`: blanks taken from the front of a decoded text. `other`: only the tokenizer's
    own decoder knows.
    """

    spelling: Literal["byte_level", "sentencepiece", "other"]
    has_byte_tokens: bool = False
    strip_left: int = 0


def read_piece_kind(decoder: Mapping[str, Any] | None) -> PieceKind:
    """The kind that a decoder of tokenizer.json implies (its JSON form, whose values are of any
    type).
    """
    steps = _steps(decoder)
    types = [step.get("type") for step in steps]
    if types == ["ByteLevel"]:
        return PieceKind(spelling="byte_level")
    strip = steps[-1] if types[-1:] == ["Strip"] else None
    core = types[:-1] if strip is not None else types
    if core not in (["Replace", "ByteFallback", "Fuse"], ["Replace", "Fuse"]):
        return PieceKind(spelling="other")
    replaces_blank = steps[0].get("pattern") == {"String": BLANK} and steps[0].get("content") == " "
    strips_blank = strip is None or (strip.get("content") == " " and strip.get("stop") == 0)
    if not replaces_blank or not strips_blank:
        return PieceKind(spelling="other")
    return PieceKind(
        spelling="sentencepiece",
        has_byte_tokens="ByteFallback" in core,
        strip_left=0 if strip is None else int(strip.get("start", 0)),
    )


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for each in decoder.get("decoders", []) for step in _steps(each)]
    return [decoder]


def piece_bytes(kind: PieceKind, token: str) -> bytes:
    """The bytes that a vocabulary entry stands for."""
    if kind.spelling == "byte_level":
        table = byte_alphabet()
        try:
            return bytes([table[character] for character in token])
        except KeyError:  # an added token, spelled as it is
            return token.encode()
    if kind.has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
        return bytes([int(match[1], 16)])
    return token.replace(BLANK, " ").encode()


@cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + n): byte for n, byte in enumerate(others)}
