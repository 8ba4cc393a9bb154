"""How large the graphs of a plan are: rows of decode steps, tokens of the pieces of others."""

from __future__ import annotations

from dataclasses import dataclass

from ..forward_mode import ForwardMode
from .candidate import find
from .selection import REGISTRIES, Selection

SMALLEST_PIECE = 8  # tokens
LARGEST_PIECE = 2048  # tokens; a larger step computes longer than its operations take to launch
ALL_POWERS = 8  # rows; up to here a graph for each power of two is near enough


@dataclass(frozen=True, kw_only=True, slots=True)
class Captures:
    """What a plan's runners capture. `is_padded`: a graph computes all its rows, live or not."""

    whole: bool
    pieces: bool
    is_padded: bool

    def decode_sizes(self, max_num_seqs: int) -> tuple[int, ...]:
        """Rows of the graphs of whole steps, smallest first."""
        if not self.whole:
            return ()
        return padded_sizes(max_num_seqs) if self.is_padded else powers(max_num_seqs)

    def piece_sizes(self, max_tokens: int) -> tuple[int, ...]:
        """Tokens of the graphs in pieces, smallest first."""
        if not self.pieces:
            return ()
        return token_sizes(max_tokens) if self.is_padded else (max_tokens,)


def captures_of(selection: Selection) -> Captures:
    """What the runners of a selection capture."""
    decode = find(REGISTRIES["runner"], selection.paths[ForwardMode.DECODE].runner).capability
    names = {path.runner for path in selection.paths.values()} - {"eager", decode.name}
    return Captures(
        whole=decode.captures_attention,
        pieces=bool(names) or (decode.name != "eager" and not decode.captures_attention),
        is_padded=selection.situation.device == "cuda",
    )


def powers(most: int) -> tuple[int, ...]:
    """Powers of two below `most`, and `most`."""
    return (*(2**i for i in range(most.bit_length()) if 2**i < most), most)


def padded_sizes(most: int) -> tuple[int, ...]:
    """Where padding is computed: four sizes for every doubling, so that above 8 rows at most a
    fifth of a graph's rows are padding.
    """
    sizes = {1, 2, 4, ALL_POWERS}
    start = ALL_POWERS
    while start < most:
        sizes |= {start + start * quarter // 4 for quarter in range(1, 5)}
        start *= 2
    return (*(size for size in sorted(sizes) if size < most), most)


def token_sizes(max_tokens: int) -> tuple[int, ...]:
    """Two sizes for every doubling, so that a step computes at most one and a half times its
    tokens.
    """
    most = min(max_tokens, LARGEST_PIECE)
    sizes, size = [], SMALLEST_PIECE
    while size < most:
        sizes += [size, size * 3 // 2]
        size *= 2
    return (*(size for size in sizes if size < most), most)
