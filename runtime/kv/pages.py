"""Bookkeeping of KV pages: who holds which page, which are free, which are idle but remembered. No
tensors.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from .prefix import PrefixIndex

SCRATCH_PAGE = 0
"""Never given out: padding and absent keys point here."""


class Pages:
    """Reference counts of the pages 1..num_pages-1.

    A page whose count falls to zero becomes free, or idle when the prefix index knows its content:
    an idle page is
    revived by `take_prefix` and is the first to go, oldest first, when no free page is left.
    """

    def __init__(self, num_pages: int, page_size: int, *, prefix_cache: bool = True) -> None:
        assert num_pages >= 2, "a pool needs the scratch page and at least one more"
        self.page_size = page_size
        self.num_usable = num_pages - 1
        self._free = deque(range(1, num_pages))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._counts = [0] * num_pages
        self._prefix = PrefixIndex(page_size) if prefix_cache else None

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Pages that some request holds."""
        return self.num_usable - self.num_free

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens fill."""
        return -(-num_tokens // self.page_size)

    def allocate(self) -> int | None:
        """A page nobody holds, with one reference, or None when all are held."""
        if self._free:
            page = self._free.popleft()
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            assert self._prefix is not None, "only a remembered page can be idle"
            self._prefix.forget(page)
        else:
            return None
        self._counts[page] = 1
        return page

    def release(self, pages: list[int]) -> None:
        """Drop one reference of each page; the last of a prefix is forgotten first."""
        for page in reversed(pages):
            assert self._counts[page] > 0, f"page {page} is released but nobody holds it"
            self._counts[page] -= 1
            if self._counts[page] == 0:
                self._retire(page)

    def _retire(self, page: int) -> None:
        if self._prefix is not None and self._prefix.knows(page):
            self._idle[page] = None
        else:
            self._free.append(page)

    def take_prefix(self, token_ids: list[int]) -> list[int]:
        """Pages that already hold the longest known prefix of `token_ids`, one reference taken of
        each.

        At least one token is always left to compute, since its logits are needed.
        """
        if self._prefix is None:
            return []
        pages = self._prefix.match(token_ids, (len(token_ids) - 1) // self.page_size)
        for page in pages:
            if self._counts[page] == 0:
                del self._idle[page]
            self._counts[page] += 1
        return pages

    def remember(self, token_ids: list[int], pages: list[int], num_computed: int) -> None:
        """Make the full pages of a request findable, once their keys and values are written."""
        if self._prefix is not None:
            self._prefix.insert(token_ids, pages, num_computed // self.page_size)

    def count(self, page: int) -> int:
        """References of one page."""
        return self._counts[page]

    def forget_all(self) -> None:
        """Drop every remembered prefix (after a failed step, whose pages may hold half-written
        values).
        """
        if self._prefix is None:
            return
        self._prefix.clear()
        self._free.extend(self._idle)
        self._idle.clear()
