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
        self._stack = np.arange(num_pages - 1, 0, -1, dtype=np.int32)  # the free ones up to `_free`, the next one last
        self._free = self.total
        # A step touches a few pages, one by one; a request that comes or goes hundreds, as arrays of the same memory.
        self._counts = np.zeros(num_pages, np.int32)
        self._marks = np.zeros(num_pages, np.uint8)
        self._readers, self._published = self._counts.data, self._marks.data
        self._cached = 0
        self._num_published = 0

    @property
    def free(self) -> int:
        return self._free

    @property
    def cached(self) -> int:
        return self._cached

    @property
    def leased(self) -> int:
        return self.total - self._free - self._cached

    def try_reserve(self, count: int) -> list[int] | None:
        """Takes `count` free pages, each with one reader; None, and nothing taken, if there are fewer."""
        left = self._free - count
        if left < 0:
            return None
        pages = self._stack[left : self._free]
        self._counts[pages] = 1
        self._free = left
        taken: list[int] = pages.tolist()
        return taken

    def retain(self, pages: Iterable[int]) -> None:
        """Adds one reader to each of some published pages."""
        readers = self._readers
        for page in pages:
            if not readers[page]:
                self._cached -= 1
            readers[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drops one reader from each page (as often as it is named); unpublished ones without readers become free."""
        readers = self._readers
        for page in pages:
            left = readers[page] - 1
            assert left >= 0, "page released more often than it was leased"
            readers[page] = left
            if not left:
                if self._published[page]:
                    self._cached += 1
                else:
                    self._push(page)

    def release_row(self, pages: np.ndarray) -> None:
        """The same for an array that names each page once, as a request's page row does."""
        if not self._num_published:  # then nothing is shared
            assert not len(pages) or self._counts[pages].max() == 1, "page released more often than it was leased"
            self._counts[pages] = 0
            self._stack[self._free : self._free + len(pages)] = pages
            self._free += len(pages)
            return
        left = self._counts[pages] - 1
        assert not left.size or left.min() >= 0, "page released more often than it was leased"
        self._counts[pages] = left
        idle = pages[left == 0]
        is_published = self._marks[idle] != 0
        freed = idle[~is_published]
        self._cached += len(idle) - len(freed)
        self._stack[self._free : self._free + len(freed)] = freed
        self._free += len(freed)

    def _push(self, page: int) -> None:
        self._stack[self._free] = page
        self._free += 1

    def publish(self, pages: Iterable[int]) -> None:
        """Hands leased pages to the trie as well: from now on they are immutable."""
        for page in pages:
            assert self._readers[page] > 0 and not self._published[page]
            self._published[page] = 1
            self._num_published += 1

    def withdraw(self, pages: Iterable[int]) -> None:
        """Takes pages back from the trie; those without readers become free."""
        for page in pages:
            assert self._published[page]
            self._published[page] = 0
            self._num_published -= 1
            if self._readers[page] == 0:
                self._cached -= 1
                self._push(page)

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
        assert np.array_equal(self._counts, readers), "reference counts differ from the leases"
        assert np.array_equal(self._marks != 0, published), "published pages differ from the trie"
        assert self._num_published == int(np.count_nonzero(published))
        idle = readers == 0
        assert self._cached == int(np.count_nonzero(idle & published))
        free = np.zeros_like(published)
        free[self._stack[: self._free]] = True
        assert self._free == int(free.sum()), "a page is free twice"
        assert np.array_equal(free[1:], (idle & ~published)[1:]), "free list differs"
        assert self.free + self.leased + self.cached == self.total
