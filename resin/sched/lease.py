"""What one request holds of the pool: a page row for each paged group, a state ring for each State group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from resin.sched.prefix import PrefixNode


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """A History or Window group as the manager needs it: W tokens of window (0 for History), S tokens a page."""

    name: str
    span_tokens: int
    window_tokens: int

    def first_needed(self, next_position: int) -> int:
        """Logical index of the first page that a query at `next_position` can see."""
        return max(next_position - self.window_tokens + 1, 0) // self.span_tokens if self.window_tokens else 0


class PageRow:
    """Pages of one History or Window group in chronological order; the last one takes the next entries.

    `first` is the logical index of the first page held: logical page i covers tokens [i * span, (i + 1) * span).
    A Window row loses pages at the front as its window moves on.
    """

    __slots__ = ("_buffer", "_start", "_stop", "first")

    def __init__(self, first: int = 0, pages: np.ndarray | None = None) -> None:
        self.first = first
        count = 0 if pages is None else len(pages)
        self._buffer = np.empty(max(8, 2 * count), np.int32)
        self._start, self._stop = 0, count
        if pages is not None:
            self._buffer[:count] = pages

    def __len__(self) -> int:
        return self._stop - self._start

    @property
    def end(self) -> int:
        """Logical index after the last page held."""
        return self.first + self._stop - self._start

    @property
    def last_page(self) -> int:
        return int(self._buffer[self._stop - 1])

    def view(self, first: int = 0) -> np.ndarray:
        """int32 view of the pages from logical index `first` on; valid until the row next grows."""
        skipped = first - self.first
        return self._buffer[self._start + skipped if skipped > 0 else self._start : self._stop]

    def at(self, logical: int) -> int:
        """The page that holds logical index `logical`."""
        return int(self._buffer[self._start + logical - self.first])

    def replace(self, logical: int, page: int) -> None:
        self._buffer[self._start + logical - self.first] = page

    def append(self, pages: list[int]) -> None:
        if self._stop + len(pages) > len(self._buffer):
            grown = np.empty(2 * (len(self) + len(pages)), np.int32)
            grown[: len(self)] = self.view()
            self._stop, self._start, self._buffer = len(self), 0, grown
        self._buffer[self._stop : self._stop + len(pages)] = pages
        self._stop += len(pages)

    def append_one(self, page: int) -> None:
        if self._stop == len(self._buffer):
            self.append([page])
        else:
            self._buffer[self._stop] = page
            self._stop += 1

    def drop_last(self, count: int) -> None:
        self._stop -= count

    def drop_before(self, logical: int) -> list[int]:
        """Removes and returns the pages before logical index `logical`."""
        count = min(logical - self.first, len(self))
        if count <= 0:
            return []
        dropped: list[int] = self._buffer[self._start : self._start + count].tolist()
        self._start += count
        self.first += count
        return dropped


class StateRing:
    """One State group's pages: the state that plans update, and checkpoints that plans in flight still read."""

    __slots__ = ("current", "held")

    def __init__(self) -> None:
        self.current: list[int] | None = None
        self.held: list[tuple[int, list[int]]] = []

    def pages(self) -> list[int]:
        """All that it holds."""
        return [*(self.current or ()), *(page for _, pages in self.held for page in pages)]

    def at(self, position: int, computed_tokens: int) -> list[int] | None:
        """Pages with the state after `position` tokens, if the ring has it; `current` is at `computed_tokens`."""
        if position == computed_tokens:
            return self.current
        return next((pages for held_at, pages in self.held if held_at == position), None)

    def advance(self, position: int, pages: list[int]) -> None:
        """Keeps the state at `position` as it is and writes the next one to `pages`."""
        if self.current is not None:
            self.held.append((position, self.current))
        self.current = pages


class CacheLease:
    """All pages of one running request, and how far the trie knows its tokens."""

    __slots__ = ("is_sound", "node", "published_tokens", "rows", "states")

    def __init__(self, rows: list[PageRow], states: list[StateRing], node: PrefixNode | None, published_tokens: int):
        self.rows = rows  # one for each History and Window group, in group order
        self.states = states  # one for each State group
        self.node = node  # deepest trie node on the request's path; None without a prefix cache
        self.published_tokens = published_tokens
        self.is_sound = True  # whether others may have what it computes

    @classmethod
    def empty(cls, paged: int, states: int, node: PrefixNode | None = None) -> CacheLease:
        """A lease of no pages for that many groups."""
        return cls([PageRow() for _ in range(paged)], [StateRing() for _ in range(states)], node, 0)

    def pages(self) -> list[int]:
        """Every page that this lease reads or writes, each once."""
        held: list[int] = []
        for row in self.rows:
            held += row.view().tolist()
        for ring in self.states:
            held += ring.pages()
        return held
