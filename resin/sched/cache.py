"""CacheManager: the one owner of pages. Leases them to requests, takes and returns them, and evicts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from resin.plan import CacheGeometry, CacheGroup, ResinError, StateGroup, WindowGroup
from resin.plan.cache import pages_of_sequence
from resin.sched.lease import CacheLease, PagedGroup, PageRow, StateRing
from resin.sched.pool import PagePool
from resin.sched.prefix_cache import PrefixCache
from resin.sched.request import Request

FEW_PAGES = 8  # that are faster released one by one


class OutOfPages(ResinError):
    """A request needs more cache pages than the pool can give it, though nobody else runs."""


@dataclass(slots=True)
class Reservation:
    """Journal of the pages taken for one plan, so that a plan that never runs gives them back."""

    grown: list[tuple[PageRow, int]] = field(default_factory=list)
    rings: list[tuple[StateRing, list[int] | None, int]] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)


class CacheManager:
    """Pages, leases and prefixes of one engine.

    Args:
        groups: the runner's cache groups.
        geometry: their page geometry.
        num_pages: pages of the arena, scratch included.
        prefix_cache: keep prefixes of finished work in spare pages.
    """

    def __init__(
        self, groups: Iterable[CacheGroup], geometry: CacheGeometry, num_pages: int, *, prefix_cache: bool
    ) -> None:
        pairs = list(zip(groups, geometry.groups, strict=True))
        self.paged = [
            PagedGroup(group.name, fill.span_tokens, group.window_tokens if isinstance(group, WindowGroup) else 0)
            for group, fill in pairs
            if not isinstance(group, StateGroup)
        ]
        self.has_groups = bool(pairs)
        self._specs = [(group, fill) for group, fill in pairs if not isinstance(group, StateGroup)]
        self.state_pages = [fill.pages_per_state for group, fill in pairs if isinstance(group, StateGroup)]
        self.checkpoint_tokens = geometry.checkpoint_tokens
        self.pool = PagePool(num_pages)
        enabled = prefix_cache and bool(pairs)
        self.prefixes = PrefixCache(self.paged, self.state_pages, geometry, self.pool, enabled=enabled)
        self.evictions = 0
        self.seals_states = enabled and bool(self.state_pages)
        self._windows = [index for index, group in enumerate(self.paged) if group.window_tokens]

    # -- room ---------------------------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Pages that a reservation can get: free ones and cached ones (which are all evictable)."""
        return self.pool.free + self.pool.cached

    def row_pages_needed(self, tokens: int, chunk_tokens: int) -> list[int]:
        """Longest row of each paged group while a sequence of `tokens` computes at most `chunk_tokens` a plan."""
        rows = []
        for spec, fill in self._specs:
            whole = pages_of_sequence(spec, fill, tokens, chunk_tokens)
            # A Window row may hold one page more, which a commit has not trimmed yet.
            rows.append(min(whole + isinstance(spec, WindowGroup), -(-tokens // fill.span_tokens)))
        return rows

    def pages_needed(self, tokens: int, chunk_tokens: int) -> int:
        """Most pages that a sequence of `tokens` leases while it computes at most `chunk_tokens` a plan."""
        states = sum(self.state_pages) * (2 if self.seals_states else 1)
        return sum(self.row_pages_needed(tokens, chunk_tokens)) + states

    def row_pages(self, lease: CacheLease, index: int, start: int, stop: int) -> int:
        """Pages of a paged group's plan row for computing tokens `[start, stop)` of the lease."""
        group = self.paged[index]
        return -(-stop // group.span_tokens) - max(lease.rows[index].first, group.first_needed(start))

    # -- reservation --------------------------------------------------------------------------------------------

    def try_extend(
        self, lease: CacheLease, committed: int, computed: int, new_tokens: int, reservation: Reservation
    ) -> bool:
        """Reserves what a request needs to compute up to `new_tokens` tokens; all or nothing.

        Window pages that no query after `committed` can see go first: the row cycles. They stay gone if the plan never
        runs. Safe while a plan up to `computed` tokens is in flight, because plans execute in dispatch order.
        """
        self.cycle(lease, committed)
        wants = [
            max(-(-new_tokens // group.span_tokens) - row.end, 0)
            for group, row in zip(self.paged, lease.rows, strict=True)
        ]
        fresh = bool(lease.states) and (lease.states[0].current is None or self.is_sealed(computed))
        pages = self._take(sum(wants) + (sum(self.state_pages) if fresh else 0))
        if pages is None:
            return False
        reservation.taken.extend(pages)
        for row, want in zip(lease.rows, wants, strict=True):
            if want:
                row.append(pages[:want])
                reservation.grown.append((row, want))
                pages = pages[want:]
        if fresh:
            self._advance_states(lease, computed, pages, reservation)
        return True

    def try_extend_rows(
        self,
        rows: list[list[PageRow]],
        committed: list[list[int]],
        seals: list[tuple[CacheLease, int]],
        reservation: Reservation,
    ) -> bool:
        """Reserves one more page for each row, and new states for sealed ones; all or nothing.

        Args:
            rows: for each paged group the rows that grow.
            committed: for each Window group the tokens of those rows without plans in flight, for cycling.
            seals: leases whose states are checkpoints from now on, with the position.
        """
        for index, positions in zip(self._windows, committed, strict=True):
            self._cycle(index, rows[index], positions)
        states = sum(self.state_pages)
        count = sum(map(len, rows)) + len(seals) * states
        if not count:
            return True
        pages = self._take(count)
        if pages is None:
            return False
        reservation.taken.extend(pages)
        start = 0
        for members in rows:
            for row in members:
                row.append_one(pages[start])
                reservation.grown.append((row, 1))
                start += 1
        for lease, position in seals:
            self._advance_states(lease, position, pages[start : start + states], reservation)
            start += states
        return True

    def cycle(self, lease: CacheLease, committed: int) -> bool:
        """Lets go of the Window pages that no query after `committed` tokens can see; False if the lease holds none."""
        return any([self._cycle(index, [lease.rows[index]], [committed]) for index in self._windows])

    def _cycle(self, index: int, rows: list[PageRow], committed: list[int]) -> bool:
        """Releases the pages of Window rows that lie before the window of the query after `committed` tokens."""
        group = self.paged[index]
        few: list[int] = []
        freed = False
        for row, position in zip(rows, committed, strict=True):
            dropped = row.drop_before(group.first_needed(position))
            if len(dropped) > FEW_PAGES:  # of a chunk of its prompt
                self.pool.release_row(np.array(dropped, np.int32))
                freed = True
            else:
                few += dropped
        self.pool.release(few)
        return freed or bool(few)

    def is_sealed(self, position: int) -> bool:
        """True if the state after `position` tokens is a checkpoint that must stay as it is."""
        return self.seals_states and position > 0 and position % self.checkpoint_tokens == 0

    def _advance_states(self, lease: CacheLease, position: int, pages: list[int], reservation: Reservation) -> None:
        for ring, count in zip(lease.states, self.state_pages, strict=True):
            reservation.rings.append((ring, ring.current, len(ring.held)))
            ring.advance(position, pages[:count])
            pages = pages[count:]

    def _take(self, count: int) -> list[int] | None:
        if count > self.available:
            return None
        while self.pool.free < count and self.prefixes.trie.evict_one():
            self.evictions += 1
        pages = self.pool.try_reserve(count)
        assert pages is not None, "cached pages must be evictable"
        return pages

    def rollback(self, reservation: Reservation) -> None:
        """Gives back everything that the reservation took."""
        for row, count in reversed(reservation.grown):
            row.drop_last(count)
        for ring, current, held in reversed(reservation.rings):
            ring.current = current
            del ring.held[held:]
        self.pool.release(reservation.taken)

    # -- commit -------------------------------------------------------------------------------------------------

    def commit(self, request: Request, position: int, computed: int) -> bool:
        """The request's first `position` tokens are in the cache: publishes them, and lets go of older checkpoints.

        Only needed with a prefix cache. Safe while a later plan (up to `computed` tokens) is in flight. True if pages
        of the request's rows were replaced by others of equal content.
        """
        lease = request.lease
        assert lease is not None
        replaced = self.prefixes.publish(request, lease, position, computed)
        for ring in lease.states:
            while ring.held and ring.held[0][0] < position:
                self.pool.release(ring.held.pop(0)[1])
        return replaced

    def release(self, request: Request, position: int = 0) -> None:
        """Ends the lease. Published pages stay cached, the others become free.

        Args:
            position: its first tokens that are in the cache and known: what of them is not published yet is now.
        """
        lease = request.lease
        if lease is None:
            return
        if position and lease.is_sound and self.prefixes.enabled:
            self.prefixes.publish(request, lease, position, position)
        for row in lease.rows:
            self.pool.release_row(row.view())
        for ring in lease.states:
            self.pool.release(ring.pages())
        request.lease = None
        if lease.node is not None:
            self.prefixes.trie.on_release(lease.node)

    # -- tests --------------------------------------------------------------------------------------------------

    def check_integrity(self, leases: Iterable[tuple[CacheLease, int]]) -> None:
        """Recomputes every count from the leases (with their computed tokens) and the trie, and compares (tests)."""
        readers = np.zeros(self.pool.total + 1, np.int32)
        published = np.zeros(self.pool.total + 1, np.bool_)
        for node in self.prefixes.trie.nodes():
            for page in node.pages():
                assert not published[page], "page held by two nodes"
                published[page] = True
        assert sum(1 for _ in self.prefixes.trie.nodes()) == self.prefixes.trie.num_nodes
        leases = list(leases)
        ends = {lease.node for lease, _ in leases}
        for node in self.prefixes.trie.nodes():
            assert node.has_pages or node.children or node in ends, "a node that leads to no page"
        for lease, computed in leases:
            pages = lease.pages()
            assert len(set(pages)) == len(pages) and 0 not in pages
            readers[pages] += 1
            for group, row in zip(self.paged, lease.rows, strict=True):
                assert row.first <= group.first_needed(computed) or not len(row)
                assert row.end >= -(-computed // group.span_tokens)
                if computed % group.span_tokens:
                    assert self.pool.is_writable(row.at(computed // group.span_tokens)), "append target is shared"
        self.pool.check_integrity(readers, published)
