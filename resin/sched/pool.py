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
        self._readers = np.zeros(num_pages, np.int32)
        self._published = np.zeros(num_pages, np.bool_)
        self._cached = 0

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
        self._readers[pages] = 1
        return pages

    def retain(self, pages: np.ndarray) -> None:
        """Adds one reader to each of some distinct published pages."""
        before = self._readers[pages]
        self._cached -= int(np.count_nonzero(before == 0))
        self._readers[pages] = before + 1

    def release(self, pages: Iterable[int] | np.ndarray) -> None:
        """Drops one reader from each of some distinct pages; unpublished pages without readers become free."""
        index = np.asarray(pages, np.int64)
        if not index.size:
            return
        left = self._readers[index] - 1
        assert left.min() >= 0, "page released more often than it was leased"
        self._readers[index] = left
        idle = index[left == 0]
        held = self._published[idle]
        self._cached += int(np.count_nonzero(held))
        self._free.extend(idle[~held].tolist())

    def publish(self, pages: Iterable[int]) -> None:
        """Hands leased pages to the trie as well: from now on they are immutable."""
        for page in pages:
            assert self._readers[page] > 0 and not self._published[page]
            self._published[page] = True

    def withdraw(self, pages: Iterable[int]) -> None:
        """Takes pages back from the trie; those without readers become free."""
        for page in pages:
            assert self._published[page]
            self._published[page] = False
            if self._readers[page] == 0:
                self._cached -= 1
                self._free.append(page)

    def is_leased(self, page: int) -> bool:
        """True if a live request uses the page."""
        return bool(self._readers[page])

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
        assert np.array_equal(self._published, published), "published pages differ from the trie"
        idle = readers == 0
        assert self._cached == int(np.count_nonzero(idle & published))
        free = np.zeros_like(published)
        free[self._free] = True
        assert len(self._free) == int(free.sum()), "a page is free twice"
        assert np.array_equal(free[1:], (idle & ~published)[1:]), "free list differs"
        assert self.free + self.leased + self.cached == self.total
