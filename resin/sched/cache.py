"""CacheManager: the one owner of pages. Leases them to requests, keeps prefixes, evicts, and audits hits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from resin.plan import CacheGeometry, CacheGroup, HistoryGroup, StateGroup, WindowGroup
from resin.sched.lease import CacheLease, PageRow, StateRing
from resin.sched.pool import PagePool
from resin.sched.prefix import PrefixAudit, PrefixNode, PrefixTrie, SeenPages
from resin.sched.request import Request


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """A History or Window group as the manager needs it: W tokens of window (0 for History), S tokens a page."""

    name: str
    span_tokens: int
    window_tokens: int

    def first_needed(self, next_position: int) -> int:
        """Logical index of the first page that a query at `next_position` can see."""
        return max(next_position - self.window_tokens + 1, 0) // self.span_tokens if self.window_tokens else 0


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
        self.state_pages = [fill.pages_per_state for group, fill in pairs if isinstance(group, StateGroup)]
        self.align_tokens = geometry.align_tokens
        self.checkpoint_tokens = geometry.checkpoint_tokens
        self.unit_tokens = min((group.span_tokens for group in self.paged), default=geometry.align_tokens)
        self.prefix_cache = prefix_cache and bool(pairs)
        self.pool = PagePool(num_pages)
        self.trie = PrefixTrie(self.pool.is_leased, self.pool.withdraw, 4 * self.unit_tokens)
        self.seen = SeenPages()
        self.evictions = 0
        self._history = [i for i, (group, _) in enumerate(self._kinds(pairs)) if isinstance(group, HistoryGroup)]
        self._windows = [i for i, (group, _) in enumerate(self._kinds(pairs)) if isinstance(group, WindowGroup)]
        self.seals_states = self.prefix_cache and bool(self.state_pages)

    @staticmethod
    def _kinds(pairs: list) -> list:
        return [pair for pair in pairs if not isinstance(pair[0], StateGroup)]

    # -- room ---------------------------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Pages that a reservation can get: free ones and cached ones (which are all evictable)."""
        return self.pool.free + self.pool.cached

    def row_pages_needed(self, tokens: int, chunk_tokens: int) -> list[int]:
        """Longest row of each paged group while a sequence of `tokens` computes at most `chunk_tokens` a plan."""
        rows = []
        for group in self.paged:
            whole = -(-tokens // group.span_tokens)
            if group.window_tokens:
                # One page more at each end than the tokens need, and one that a commit has not trimmed yet.
                whole = min(whole, (group.window_tokens + chunk_tokens - 2) // group.span_tokens + 3)
            rows.append(whole)
        return rows

    def pages_needed(self, tokens: int, chunk_tokens: int) -> int:
        """Most pages that a sequence of `tokens` leases while it computes at most `chunk_tokens` a plan."""
        states = sum(self.state_pages) * (2 if self.prefix_cache else 1)
        return sum(self.row_pages_needed(tokens, chunk_tokens)) + states

    # -- admission ----------------------------------------------------------------------------------------------

    def lease(self, request: Request) -> CacheLease:
        """A lease that starts with the longest cached prefix of the request's tokens; its first one sets the audit.

        The last known token is always left to compute.
        """
        tokens = request.all_ids()
        if not self.prefix_cache:
            return self._empty_lease(None)
        raw = tokens.tobytes()
        limit = (len(tokens) - 1) // self.align_tokens
        if request.params.prompt_logprobs is not None and not request.output_ids:
            path: list[PrefixNode] = []
        else:
            path = self.trie.walk(request.cache_salt, raw, 4 * self.align_tokens, limit)
        depth, losses = self._resumable_depth(path)
        lease = self._lease_path(request.cache_salt, path[:depth])
        if request.prefix_audit is None:
            assert lease.node is not None
            hit, unit = lease.published_tokens, self.unit_tokens
            rest = raw[4 * hit : 4 * ((len(tokens) - 1) // unit * unit)]
            seen = self.seen.count_leading(lease.node.fingerprints[-1], rest, 4 * unit)
            ceiling = max(hit + seen * unit, len(path) * self.align_tokens)
            request.prefix_audit = self._audit(request, len(path), depth, losses, ceiling)
        return lease

    def _resumable_depth(self, path: list[PrefixNode]) -> tuple[int, dict[str, int]]:
        """The deepest node of the path at which every group can resume, and tokens lost on the way up, by reason."""
        losses: dict[str, int] = {}
        depth = len(path)
        while depth:
            reason = self._why_not_resume(path, depth)
            if reason is None:
                break
            losses[reason] = losses.get(reason, 0) + self.align_tokens
            depth -= 1
        return depth, losses

    def _why_not_resume(self, path: list[PrefixNode], depth: int) -> str | None:
        if self.state_pages:
            if depth * self.align_tokens % self.checkpoint_tokens:
                return "unaligned"
            if path[depth - 1].state is None:
                return "no checkpoint"
        for order, index in enumerate(self._windows):
            missing = self._window_tail(index, depth * self.align_tokens)
            for node in reversed(path[:depth]):
                if missing <= 0:
                    break
                if node.windows is None:
                    return "window gone"
                missing -= len(node.windows[order])
        return None

    def _window_tail(self, index: int, position: int) -> int:
        """Window pages needed to resume at an aligned `position`."""
        group = self.paged[index]
        return position // group.span_tokens - group.first_needed(position)

    def _lease_path(self, salt: str, path: list[PrefixNode]) -> CacheLease:
        lease = self._empty_lease(salt)
        if not path:
            return lease
        position = len(path) * self.align_tokens
        for order, index in enumerate(self._history):
            pages = [page for node in path for page in node.history[order]]
            lease.rows[index] = PageRow(0, np.asarray(pages, np.int32))
        for order, index in enumerate(self._windows):
            tail = self._window_tail(index, position)
            kept: list[int] = []
            for node in reversed(path):
                if len(kept) >= tail:
                    break
                assert node.windows is not None
                kept = node.windows[order] + kept
            kept = kept[len(kept) - tail :]
            lease.rows[index] = PageRow(position // self.paged[index].span_tokens - tail, np.asarray(kept, np.int32))
        state = list(path[-1].state or ())
        for ring, count in zip(lease.states, self.state_pages, strict=True):
            ring.current, state = state[:count], state[count:]
        for row in lease.rows:
            self.pool.retain(row.view().tolist())
        for ring in lease.states:
            self.pool.retain(ring.current or ())
        lease.node = path[-1]
        lease.published_tokens = position
        self.trie.touch(path[-1])
        return lease

    def _empty_lease(self, salt: str | None) -> CacheLease:
        root = self.trie.root(salt) if salt is not None else None
        return CacheLease([PageRow() for _ in self.paged], [StateRing() for _ in self.state_pages], root, 0)

    def _audit(
        self, request: Request, found: int, depth: int, losses: dict[str, int], ceiling_tokens: int
    ) -> PrefixAudit:
        aligned = ceiling_tokens // self.align_tokens * self.align_tokens
        missing = aligned - found * self.align_tokens
        if missing > 0:
            bypassed = request.params.prompt_logprobs is not None
            losses["bypassed" if bypassed else "evicted"] = missing
        if ceiling_tokens > aligned:
            losses["unaligned"] = losses.get("unaligned", 0) + ceiling_tokens - aligned
        return PrefixAudit(depth * self.align_tokens, ceiling_tokens, losses)

    # -- reservation --------------------------------------------------------------------------------------------

    def try_extend(
        self, lease: CacheLease, committed: int, computed: int, new_tokens: int, reservation: Reservation
    ) -> bool:
        """Reserves what a request needs to compute up to `new_tokens` tokens; all or nothing.

        Window pages that no query after `committed` can see go first: the row cycles. They stay gone if the plan never
        runs. Safe while a plan up to `computed` tokens is in flight, because plans execute in dispatch order.
        """
        for index in self._windows:
            self.pool.release(self._cycle(index, [lease.rows[index]], [committed]))
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
            self.pool.release(self._cycle(index, rows[index], positions))
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

    def _cycle(self, index: int, rows: list[PageRow], committed: list[int]) -> list[int]:
        """Takes the pages out of Window rows that lie before the window of the query after `committed` tokens."""
        group = self.paged[index]
        dropped: list[int] = []
        for row, position in zip(rows, committed, strict=True):
            dropped += row.drop_before(group.first_needed(position))
        return dropped

    def is_sealed(self, position: int) -> bool:
        """True if the state after `position` tokens is a checkpoint that must stay as it is."""
        return self.prefix_cache and position > 0 and position % self.checkpoint_tokens == 0

    def _advance_states(self, lease: CacheLease, position: int, pages: list[int], reservation: Reservation) -> None:
        for ring, count in zip(lease.states, self.state_pages, strict=True):
            reservation.rings.append((ring, ring.current, len(ring.held)))
            ring.advance(position, pages[:count])
            pages = pages[count:]

    def _take(self, count: int) -> list[int] | None:
        if count > self.available:
            return None
        while self.pool.free < count and self.trie.evict_one():
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

    def commits_at(self, committed: np.ndarray) -> np.ndarray:
        """bool [n]: positions at which `commit` has something to do."""
        due = committed % self.align_tokens == 0
        if self.state_pages:
            due |= committed % self.checkpoint_tokens == 1
        return due

    def commit(self, request: Request, position: int, computed: int) -> bool:
        """The request's first `position` tokens are in the cache: publish them, and let go of older checkpoints.

        Only needed with a prefix cache. Safe while a later plan (up to `computed` tokens) is in flight. True if pages
        of the request's rows were replaced by others of equal content.
        """
        lease = request.lease
        assert lease is not None
        replaced = False
        if lease.node is not None and position - lease.published_tokens >= self.align_tokens:
            replaced = self._publish(request, lease, position, computed)
        for ring in lease.states:
            while ring.held and ring.held[0][0] < position:
                self.pool.release(ring.held.pop(0)[1])
        return replaced

    def release(self, request: Request) -> None:
        """Ends the lease. Published pages stay cached, the others become free."""
        lease = request.lease
        if lease is None:
            return
        self.pool.release(lease.pages())
        request.lease = None
        if lease.node is not None:
            self.trie.on_release(lease.node)

    def _publish(self, request: Request, lease: CacheLease, position: int, computed: int) -> bool:
        span = self.align_tokens
        first, last = lease.published_tokens, position // span * span
        raw = request.token_slice(first, last).tobytes()
        node = lease.node
        assert node is not None
        if not node.alive:
            node = self._rebuild_path(request, first)
        replaced = False
        for start in range(first, last, span):
            key = raw[4 * (start - first) : 4 * (start - first + span)]
            child = node.children.get(key)
            if child is None:
                child = self._publish_new(node, key, lease, start)
            else:
                replaced |= self._share_existing(child, lease, start)
            self._attach_resume(child, lease, start + span, computed)
            self.seen.add(child.fingerprints)
            node = child
        lease.node, lease.published_tokens = node, last
        return replaced

    def _rebuild_path(self, request: Request, position: int) -> PrefixNode:
        """Nodes without pages down to `position`: only models without History can lose a live request's path."""
        assert not self._history or position == 0
        node = self.trie.root(request.cache_salt)
        raw, step = request.token_slice(0, position).tobytes(), 4 * self.align_tokens
        for offset in range(0, len(raw), step):
            key = raw[offset : offset + step]
            node = node.children.get(key) or self.trie.add(node, key, [])
        return node

    def _spans(self, index: int, start: int, stop: int) -> range:
        span = self.paged[index].span_tokens
        return range(start // span, stop // span)

    def _publish_new(self, parent: PrefixNode, key: bytes, lease: CacheLease, start: int) -> PrefixNode:
        history = []
        for index in self._history:
            row = lease.rows[index]
            pages = [row.at(logical) for logical in self._spans(index, start, start + self.align_tokens)]
            self.pool.publish(pages)
            history.append(pages)
        return self.trie.add(parent, key, history)

    def _share_existing(self, node: PrefixNode, lease: CacheLease, start: int) -> bool:
        """Another request published the same span first: read its pages and give back our copies, if we have some."""
        replaced = False
        for order, index in enumerate(self._history):
            row = lease.rows[index]
            theirs = node.history[order]
            logicals = self._spans(index, start, start + self.align_tokens)
            ours = [row.at(logical) for logical in logicals]
            if ours == theirs:
                continue
            self.pool.retain(theirs)
            for logical, page in zip(logicals, theirs, strict=True):
                row.replace(logical, page)
            self.pool.release(ours)
            replaced = True
        self.trie.touch(node)
        return replaced

    def _attach_resume(self, node: PrefixNode, lease: CacheLease, end: int, computed: int) -> None:
        """Gives the node Window pages and a checkpoint for resuming at `end`, if it lacks them and we have them."""
        added = False
        if self._windows and node.windows is None:
            tails = [self._held_window(index, lease, end) for index in self._windows]
            if all(tail is not None for tail in tails):
                node.windows = [tail for tail in tails if tail is not None]
                added = True
                for tail in node.windows:
                    self.pool.publish(tail)
        if self.state_pages and node.state is None and end % self.checkpoint_tokens == 0:
            states = [ring.at(end, computed) for ring in lease.states]
            if all(state is not None for state in states):
                node.state = [page for state in states if state is not None for page in state]
                self.pool.publish(node.state)
                added = True
        if added:
            self.trie.offer_resume(node)

    def _held_window(self, index: int, lease: CacheLease, end: int) -> list[int] | None:
        """Our unpublished Window pages of the span that ends at `end`; None if some are gone or another node's."""
        group, row = self.paged[index], lease.rows[index]
        first = max(group.first_needed(end), (end - self.align_tokens) // group.span_tokens)
        if row.first > first:
            return None
        pages = [row.at(logical) for logical in range(first, end // group.span_tokens)]
        return pages if all(self.pool.is_writable(page) for page in pages) else None

    # -- tests --------------------------------------------------------------------------------------------------

    def check_integrity(self, leases: Iterable[tuple[CacheLease, int]]) -> None:
        """Recomputes every count from the leases (with their computed tokens) and the trie, and compares (tests)."""
        readers = np.zeros(self.pool.total + 1, np.int32)
        published = np.zeros(self.pool.total + 1, np.bool_)
        for node in self.trie.nodes():
            for page in node.pages():
                assert not published[page], "page held by two nodes"
                published[page] = True
        assert sum(1 for _ in self.trie.nodes()) == self.trie.num_nodes
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
