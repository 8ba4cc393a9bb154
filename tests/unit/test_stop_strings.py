"""Stop strings: found however the text is cut, and nothing is given out too early."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polypath.runtime.stop_strings import StopMatcher

texts = st.text(alphabet="ab", max_size=30)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)


def run(
    pieces: list[str], stops: list[str], *, include_stop: bool = False
) -> tuple[str, str | None]:
    matcher, given_out = StopMatcher(stops, include_stop=include_stop), ""
    for piece in pieces:
        text, found = matcher.push(piece)
        given_out += text
        if found is not None:
            return given_out, found
    return given_out + matcher.finish(), None


def plainly(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The stop that completes first; of two that end together, the longer."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            found = max(ending, key=len)
            return text[: end - len(found)], found
    return text, None


@given(texts, stop_lists, st.lists(st.integers(0, 30)))
def test_any_cutting_gives_what_the_whole_text_gives(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert run(pieces, stops) == plainly(text, stops)


@given(texts, stop_lists)
def test_what_is_given_out_never_has_to_be_taken_back(text: str, stops: list[str]) -> None:
    final = plainly(text, stops)[0]
    matcher, given_out = StopMatcher(stops), ""
    for character in text:
        piece, found = matcher.push(character)
        given_out += piece
        assert final.startswith(given_out)
        if found is not None:
            break


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "found"),
    [
        (["hello wor", "ld and more"], ["world"], "hello ", "world"),
        (["a", "b", "c"], ["abc", "bc"], "", "abc"),
        (["abcd"], ["bcd", "c"], "ab", "c"),
        (["aab"], ["ab"], "a", "ab"),
        (["END"], ["END"], "", "END"),
        (["no stop her"], ["here"], "no stop her", None),
        (["", "", "x"], ["x"], "", "x"),
    ],
)
def test_known_cases(pieces: list[str], stops: list[str], text: str, found: str | None) -> None:
    assert run(pieces, stops) == (text, found)


def test_the_stop_string_is_kept_on_request() -> None:
    assert run(["a", "bXYc"], ["XY"], include_stop=True) == ("abXY", "XY")


def test_without_stops_text_passes_at_once() -> None:
    assert StopMatcher([]).push("abc") == ("abc", None)


def test_many_long_stops_stay_fast() -> None:
    matcher = StopMatcher(["a" * 499 + chr(0x100 + n) for n in range(64)])
    start = time.perf_counter()
    for _ in range(1000):
        matcher.push("aaaa")
    assert time.perf_counter() - start < 3.0
