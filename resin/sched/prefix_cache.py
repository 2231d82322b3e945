"""The prefix cache: leases that start with cached pages, publishing of computed ones, and the audit of hits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from resin.plan import CacheGeometry
from resin.sched.keys import KEY_BYTES
from resin.sched.lease import CacheLease, PagedGroup, PageRow
from resin.sched.pool import PagePool
from resin.sched.prefix import PrefixAudit, PrefixNode, PrefixTrie, SeenPages
from resin.sched.request import Request


class PrefixCache:
    """Shares the pages of equal prefixes between requests. Off, it finds nothing and publishes nothing.

    Args:
        paged: the History and Window groups.
        state_pages: pages of a state, for each State group.
        geometry: where prefixes and checkpoints can end.
        pool: the owner of the pages.
    """

    def __init__(
        self,
        paged: Sequence[PagedGroup],
        state_pages: Sequence[int],
        geometry: CacheGeometry,
        pool: PagePool,
        *,
        enabled: bool,
    ) -> None:
        self.enabled = enabled
        self.paged = paged
        self.state_pages = state_pages
        self.align_tokens = geometry.align_tokens
        self.checkpoint_tokens = geometry.checkpoint_tokens
        self.unit_tokens = min((group.span_tokens for group in paged), default=geometry.align_tokens)
        self.pool = pool
        self.trie = PrefixTrie(pool.is_leased, pool.withdraw, KEY_BYTES * self.unit_tokens)
        self.seen = SeenPages()
        self._history = [i for i, group in enumerate(paged) if not group.window_tokens]
        self._windows = [i for i, group in enumerate(paged) if group.window_tokens]

    # -- reuse --------------------------------------------------------------------------------------------------

    def lease(self, request: Request) -> CacheLease:
        """A lease that starts with the longest cached prefix of the request's tokens; its first one sets the audit.

        The last known token is always left to compute.
        """
        if not self.enabled:
            return CacheLease.empty(len(self.paged), len(self.state_pages))
        known = request.num_tokens
        raw = request.key_ids(0, known).tobytes()
        path = self._cached_path(request, raw)
        depth, losses = self._resumable_depth(path)
        lease = self._lease_path(request.cache_salt, path[:depth])
        if request.prefix_audit is None:
            assert lease.node is not None
            hit, unit = lease.published_tokens, self.unit_tokens
            rest = raw[KEY_BYTES * hit : KEY_BYTES * ((known - 1) // unit * unit)]
            seen = self.seen.count_leading(lease.node.fingerprints[-1], rest, KEY_BYTES * unit)
            ceiling = max(hit + seen * unit, len(path) * self.align_tokens)
            hits = len(path), depth
            request.prefix_audit = _audit(request, self.align_tokens, hits, losses, ceiling)
        return lease

    def peek(self, request: Request) -> int:
        """Tokens that `lease` would find cached; nothing counts as used."""
        if not self.enabled:
            return 0
        raw = request.key_ids(0, request.num_tokens).tobytes()
        return self._resumable_depth(self._cached_path(request, raw))[0] * self.align_tokens

    def _cached_path(self, request: Request, raw: bytes) -> list[PrefixNode]:
        """Nodes of the leading spans, at most all but the last known token; `raw` are the keys of all."""
        if request.params.prompt_logprobs is not None and not request.output_ids:
            return []
        limit = (request.num_tokens - 1) // self.align_tokens
        return self.trie.walk(request.cache_salt, raw, KEY_BYTES * self.align_tokens, limit)

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
        lease = CacheLease.empty(len(self.paged), len(self.state_pages), self.trie.root(salt))
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

    # -- publishing ---------------------------------------------------------------------------------------------

    def due(self, committed: np.ndarray, counts: np.ndarray | int) -> list[int]:
        """Which of the positions of decoding rows, reached by `counts` tokens, need `publish`, or have a State group
        let go of a checkpoint.

        Window pages and States must be published before their rows move on: where there are States, at their
        checkpoints, as nobody can resume anywhere else, if Windows of one width are all there then. History waits for
        the row's end, when it costs no step of the others anything.
        """
        if not self._windows and not self.state_pages:
            return []
        widths = {self.paged[index].window_tokens for index in self._windows}
        span = self.checkpoint_tokens if self.state_pages and len(widths) < 2 else self.align_tokens
        due = committed % span < counts
        if self.state_pages:
            due |= (committed - 1) % self.checkpoint_tokens < counts
        return [int(row) for row in np.flatnonzero(due)]

    def publish(self, request: Request, lease: CacheLease, position: int, computed: int) -> bool:
        """The request's first `position` tokens are in the cache: hands their whole spans to the trie.

        Safe while a later plan (up to `computed` tokens) is in flight. True if pages of the request's rows were
        replaced by others of equal content.
        """
        span = self.align_tokens
        if lease.node is None or position - lease.published_tokens < span:
            return False
        first, last = lease.published_tokens, position // span * span
        raw = request.key_ids(first, last).tobytes()
        node = lease.node
        assert node is not None
        if not node.alive:
            node = self._rebuild_path(request, first)
        replaced = False
        for start in range(first, last, span):
            key = raw[KEY_BYTES * (start - first) : KEY_BYTES * (start - first + span)]
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
        raw, step = request.key_ids(0, position).tobytes(), KEY_BYTES * self.align_tokens
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


def _audit(
    request: Request, span_tokens: int, hits: tuple[int, int], losses: dict[str, int], ceiling_tokens: int
) -> PrefixAudit:
    """Args: `hits` are the spans found, and those from which every group can resume."""
    found, depth = hits
    aligned = ceiling_tokens // span_tokens * span_tokens
    missing = aligned - found * span_tokens
    if missing > 0:
        bypassed = request.params.prompt_logprobs is not None
        losses["bypassed" if bypassed else "evicted"] = missing
    if ceiling_tokens > aligned:
        losses["unaligned"] = losses.get("unaligned", 0) + ceiling_tokens - aligned
    return PrefixAudit(depth * span_tokens, ceiling_tokens, losses)
