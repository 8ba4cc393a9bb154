"""The tree of known prefixes."""

from __future__ import annotations

from polypath.runtime.kv.prefix import PrefixIndex


def test_finds_the_longest_known_start() -> None:
    index = PrefixIndex(2)
    index.insert([1, 2, 3, 4, 5, 6], [10, 11, 12], 3)
    assert index.match([1, 2, 3, 4, 5, 6], 3) == [10, 11, 12]
    assert index.match([1, 2, 3, 4, 9, 9], 3) == [10, 11]
    assert index.match([1, 2, 3, 4, 5, 6], 1) == [10]
    assert index.match([2, 1], 1) == []


def test_keeps_the_first_page_of_known_content() -> None:
    index = PrefixIndex(2)
    index.insert([1, 2, 3, 4], [10, 11], 2)
    index.insert([1, 2, 3, 4, 5, 6], [20, 21, 22], 3)
    assert index.match([1, 2, 3, 4, 5, 6], 3) == [10, 11, 22]
    assert not index.knows(20)


def test_branches_share_their_start() -> None:
    index = PrefixIndex(1)
    index.insert([1, 2], [10, 11], 2)
    index.insert([1, 3], [10, 12], 2)
    assert index.match([1, 2], 2) == [10, 11]
    assert index.match([1, 3], 2) == [10, 12]


def test_below_a_forgotten_page_nothing_is_found_even_when_its_content_returns() -> None:
    index = PrefixIndex(1)
    index.insert([1, 2], [10, 11], 2)
    index.forget(10)
    assert index.match([1, 2], 2) == []
    index.insert([1], [20], 1)
    assert index.match([1, 2], 2) == [20]


def test_clearing_forgets_everything() -> None:
    index = PrefixIndex(1)
    index.insert([1, 2], [10, 11], 2)
    index.clear()
    assert index.match([1, 2], 2) == []
    assert not index.knows(10)
