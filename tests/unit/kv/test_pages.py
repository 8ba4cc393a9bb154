"""Reference counts of pages, prefix reuse and the order in which idle pages go."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from polypath.runtime.kv.pages import SCRATCH_PAGE, Pages

PAGE = 4


def _hold(pages: Pages, token_ids: list[int]) -> list[int]:
    """Pages for all of these tokens, computed and remembered, as the scheduler would."""
    held = pages.take_prefix(token_ids)
    while len(held) < pages.pages_for(len(token_ids)):
        page = pages.allocate()
        assert page is not None
        held.append(page)
    pages.remember(token_ids, held, len(token_ids))
    return held


def test_gives_every_page_but_the_scratch_page_once() -> None:
    pages = Pages(5, PAGE)
    given = [pages.allocate() for _ in range(5)]
    assert given[-1] is None
    assert sorted(p for p in given if p is not None) == [1, 2, 3, 4]
    assert SCRATCH_PAGE not in given
    assert (pages.num_free, pages.num_used) == (0, 4)


def test_counts_pages_of_tokens_upwards() -> None:
    pages = Pages(5, PAGE)
    assert [pages.pages_for(n) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_finds_full_pages_of_a_known_start() -> None:
    pages = Pages(20, PAGE)
    first = _hold(pages, list(range(10)))
    assert pages.take_prefix([*range(8), 99, 98, 97, 96, 95]) == first[:2]
    assert pages.take_prefix([*range(7), 99, 98]) == first[:1]
    assert pages.take_prefix([99, *range(9)]) == []


def test_always_leaves_a_token_to_compute() -> None:
    pages = Pages(20, PAGE)
    first = _hold(pages, list(range(8)))
    assert pages.take_prefix(list(range(8))) == first[:1]
    assert pages.take_prefix(list(range(9))) == first


def test_the_same_tokens_after_another_start_are_not_the_same() -> None:
    pages = Pages(20, PAGE)
    _hold(pages, [1, 1, 1, 1, 7, 7, 7, 7])
    assert pages.take_prefix([2, 2, 2, 2, 7, 7, 7, 7, 0]) == []
    assert pages.take_prefix([7, 7, 7, 7, 0]) == []


def test_a_shared_page_is_free_when_its_last_holder_lets_go() -> None:
    pages = Pages(4, PAGE)
    first = _hold(pages, list(range(9)))
    second = pages.take_prefix(list(range(9)))
    assert [pages.count(p) for p in first] == [2, 2, 1]
    pages.release(first)
    assert (pages.num_used, pages.num_free) == (2, 1)
    pages.release(second)
    assert (pages.num_used, pages.num_free) == (0, 3)


def test_idle_pages_go_last_and_the_deepest_and_oldest_of_them_first() -> None:
    pages = Pages(6, PAGE)
    old, young = _hold(pages, [1] * 8), _hold(pages, [2] * 8)
    pages.release(old)
    pages.release(young)
    assert pages.allocate() == 5
    assert [pages.allocate() for _ in range(4)] == [old[1], old[0], young[1], young[0]]


def test_a_page_that_is_given_away_is_forgotten_with_all_below_it() -> None:
    pages = Pages(4, PAGE)
    held = _hold(pages, list(range(12)))
    pages.release(held)
    taken = [pages.allocate(), pages.allocate()]
    assert taken == [held[2], held[1]]
    assert pages.take_prefix(list(range(13))) == held[:1]


def test_without_a_prefix_cache_nothing_is_found() -> None:
    pages = Pages(6, PAGE, prefix_cache=False)
    held = _hold(pages, list(range(8)))
    assert pages.take_prefix(list(range(9))) == []
    pages.release(held)
    assert pages.num_free == 5
    pages.forget_all()


def test_forgetting_all_frees_idle_pages_and_keeps_held_ones() -> None:
    pages = Pages(8, PAGE)
    held, idle = _hold(pages, [1] * 8), _hold(pages, [2] * 8)
    pages.release(idle)
    pages.forget_all()
    assert pages.take_prefix([1] * 9) == pages.take_prefix([2] * 9) == []
    assert (pages.num_used, pages.num_free) == (2, 5)
    pages.release(held)
    assert pages.num_free == 7


class _AnyUse(RuleBasedStateMachine):
    """Whatever is asked in whatever order: no page is lost, owned twice, or holds other tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = Pages(9, PAGE)
        self.held: list[tuple[list[int], list[int]]] = []  # tokens, pages
        self.content: dict[int, tuple[int, ...]] = {}  # page -> all tokens up to its end

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def hold(self, tokens: list[int]) -> None:
        found = self.pages.take_prefix(tokens)
        assert len(found) * PAGE < len(tokens)
        for i, page in enumerate(found):
            assert self.content[page] == tuple(tokens[: (i + 1) * PAGE])
        while len(found) < self.pages.pages_for(len(tokens)):
            page = self.pages.allocate()
            if page is None:
                self.pages.release(found)
                return
            assert self.pages.count(page) == 1
            found.append(page)
            self.content[page] = tuple(tokens[: len(found) * PAGE])
        self.pages.remember(tokens, found, len(tokens))
        self.held.append((tokens, found))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100))
    def release(self, which: int) -> None:
        _, pages = self.held.pop(which % len(self.held))
        self.pages.release(pages)

    @rule()
    def forget_all(self) -> None:
        self.pages.forget_all()

    @invariant()
    def counts_are_the_holders(self) -> None:
        owned = [page for _, pages in self.held for page in pages]
        assert all(self.pages.count(page) == owned.count(page) for page in range(9))
        assert self.pages.num_used == len(set(owned))
        assert self.pages.num_free == 8 - len(set(owned))


TestAnyUse = _AnyUse.TestCase
TestAnyUse.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
