"""Finding pages by the tokens that led to them: a tree keyed by exact tokens, so that no hash can
be mistaken.
"""

from __future__ import annotations

from itertools import count

ROOT = 0
Key = tuple[int, tuple[int, ...]]


class PrefixIndex:
    """Maps (parent node, tokens of one page) to the page that holds their keys and values.

    Node numbers are never used twice, so the children of a forgotten page can no longer be reached
    and age out.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._numbers = count(ROOT + 1)
        self._pages: dict[Key, int] = {}
        self._nodes: dict[int, tuple[int, Key]] = {}  # page -> its node and the key it is found by

    def knows(self, page: int) -> bool:
        """Whether this page can be found."""
        return page in self._nodes

    def match(self, token_ids: list[int], max_pages: int) -> list[int]:
        """The known pages that hold the first tokens of `token_ids`, in order."""
        node, found = ROOT, []
        for i in range(max_pages):
            page = self._pages.get((node, self._tokens(token_ids, i)))
            if page is None:
                break
            found.append(page)
            node = self._nodes[page][0]
        return found

    def insert(self, token_ids: list[int], pages: list[int], num_full: int) -> None:
        """Remember the first `num_full` pages of a request; content that is known already keeps its
        first page.
        """
        node, first = self._deepest_known(pages, num_full)
        for i in range(first, num_full):
            key = (node, self._tokens(token_ids, i))
            twin = self._pages.get(key)
            if twin is None:
                node = next(self._numbers)
                self._pages[key], self._nodes[pages[i]] = pages[i], (node, key)
            else:
                node = self._nodes[twin][0]

    def _deepest_known(self, pages: list[int], num_full: int) -> tuple[int, int]:
        for i in range(num_full - 1, -1, -1):
            if pages[i] in self._nodes:
                return self._nodes[pages[i]][0], i + 1
        return ROOT, 0

    def _tokens(self, token_ids: list[int], i: int) -> tuple[int, ...]:
        return tuple(token_ids[i * self._page_size : (i + 1) * self._page_size])

    def forget(self, page: int) -> None:
        """Make one page unfindable."""
        _, key = self._nodes.pop(page)
        del self._pages[key]

    def clear(self) -> None:
        """Forget everything."""
        self._pages.clear()
        self._nodes.clear()
