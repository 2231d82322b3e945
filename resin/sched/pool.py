"""The page pool: who owns which of the arena's equal-size pages.

A page is *free* (nobody's), *leased* (one or more live requests use it) or *cached* (only the prefix trie holds it).
Page 0 is scratch and never handed out. free + leased + cached == total, always.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class PagePool:
    """Owns the reference count of every page.

    Args:
        num_pages: pages of the arena, scratch page 0 included.
    """

    def __init__(self, num_pages: int) -> None:
        self.total = max(num_pages - 1, 0)
        self._free = list(range(num_pages - 1, 0, -1))
        # Plain lists: a step touches a few pages, where NumPy calls cost more than the loop.
        self._readers = [0] * num_pages
        self._published = bytearray(num_pages)
        self._cached = 0
        self._holds_published = False  # whether the trie ever got a page

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return self._cached

    @property
    def leased(self) -> int:
        return self.total - len(self._free) - self._cached

    def try_reserve(self, count: int) -> list[int] | None:
        """Takes `count` free pages, each with one reader; None, and nothing taken, if there are fewer."""
        if count > len(self._free):
            return None
        if count == 0:
            return []
        pages = self._free[-count:]
        del self._free[-count:]
        for page in pages:
            self._readers[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Adds one reader to each of some published pages."""
        readers = self._readers
        for page in pages:
            if not readers[page]:
                self._cached -= 1
            readers[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drops one reader from each page (as often as it is named); unpublished ones without readers become free."""
        readers, published, free = self._readers, self._published, self._free
        if not self._holds_published:  # nothing is shared: whatever is released becomes free
            pages = list(pages)
            assert [readers[page] for page in pages].count(1) == len(pages), "page released that nobody leased"
            for page in pages:
                readers[page] = 0
            free += pages
            return
        for page in pages:
            left = readers[page] - 1
            assert left >= 0, "page released more often than it was leased"
            readers[page] = left
            if not left:
                if published[page]:
                    self._cached += 1
                else:
                    free.append(page)

    def publish(self, pages: Iterable[int]) -> None:
        """Hands leased pages to the trie as well: from now on they are immutable."""
        for page in pages:
            assert self._readers[page] > 0 and not self._published[page]
            self._holds_published = True
            self._published[page] = 1

    def withdraw(self, pages: Iterable[int]) -> None:
        """Takes pages back from the trie; those without readers become free."""
        for page in pages:
            assert self._published[page]
            self._published[page] = 0
            if self._readers[page] == 0:
                self._cached -= 1
                self._free.append(page)

    def is_leased(self, page: int) -> bool:
        """True if a live request uses the page."""
        return self._readers[page] > 0

    def is_writable(self, page: int) -> bool:
        """True if exactly one live request uses the page and the trie does not hold it."""
        return self._readers[page] == 1 and not self._published[page]

    def check_integrity(self, readers: np.ndarray, published: np.ndarray) -> None:
        """Compares the pool with counts recomputed from the leases and the trie (tests).

        Args:
            readers: int [num_pages], live requests a page.
            published: bool [num_pages], pages that trie nodes hold.
        """
        assert np.array_equal(self._readers, readers), "reference counts differ from the leases"
        assert np.array_equal(np.frombuffer(self._published, np.bool_), published), (
            "published pages differ from the trie"
        )
        idle = readers == 0
        assert self._cached == int(np.count_nonzero(idle & published))
        free = np.zeros_like(published)
        free[self._free] = True
        assert len(self._free) == int(free.sum()), "a page is free twice"
        assert np.array_equal(free[1:], (idle & ~published)[1:]), "free list differs"
        assert self.free + self.leased + self.cached == self.total
