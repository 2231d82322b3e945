"""The prefix trie: which pages hold which exact tokens, told apart by their key ids, for reuse across requests.

A node stands for one aligned span of tokens below its parent. It holds the History pages of that span and, as far as
they still exist, what a request needs to resume at its end: the last Window pages and a State checkpoint. All pages of
the trie are immutable. Nodes leave in least-recently-used order, leaves first; Window pages and checkpoints of any
node may leave alone.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from resin.plan.mapping import FrozenMapping


@dataclass(frozen=True, slots=True)
class PrefixAudit:
    """What the prefix cache gave a request and why it did not give more.

    Attributes:
        hit_tokens: prompt tokens whose cache entries were reused.
        ceiling_tokens: what an unbounded cache would have given, from fingerprints of the last million pages.
        losses: reason -> tokens of the ceiling that were lost: "evicted" (pages left the pool), "unaligned" (no group
            boundary or checkpoint position there), "window gone" and "no checkpoint" (History was there, but not what
            a Window or State needs to resume), "bypassed" (the request needs logits of its whole prompt).
    """

    hit_tokens: int
    ceiling_tokens: int
    losses: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "losses", FrozenMapping(self.losses))


class PrefixNode:
    """One span of a cached prefix. `fingerprints` are those of its pages (see SeenPages), a root's one of its salt."""

    __slots__ = ("alive", "children", "fingerprints", "history", "key", "listed", "parent", "state", "tick", "windows")

    def __init__(
        self, parent: PrefixNode | None, key: bytes, history: list[list[int]], fingerprints: list[int]
    ) -> None:
        self.parent = parent
        self.key = key
        self.fingerprints = fingerprints
        self.children: dict[bytes, PrefixNode] = {}
        self.history = history  # a page list for each History group
        self.windows: list[list[int]] | None = None  # a page list for each Window group, or gone
        self.state: list[int] | None = None  # pages of all State groups, or no checkpoint
        self.tick = 0
        self.listed = [False, False]  # whether the candidates hold it as LEAF and as RESUME
        self.alive = True

    @property
    def has_resume(self) -> bool:
        return any(self.windows or ()) or bool(self.state)

    @property
    def has_pages(self) -> bool:
        return any(self.history) or self.has_resume

    def resume_pages(self) -> Iterator[int]:
        """Pages that only matter for resuming at this node's end."""
        for pages in self.windows or ():
            yield from pages
        yield from self.state or ()

    def pages(self) -> Iterator[int]:
        for pages in self.history:
            yield from pages
        yield from self.resume_pages()


LEAF, RESUME = 0, 1


class PrefixTrie:
    """Nodes by exact key ids, one root a salt, with least-recently-used eviction.

    Args:
        is_leased: tells whether a live request uses a page.
        withdraw: takes pages back into the pool; live readers go on reading them.
        page_bytes: size of the key ids of the smallest page, by which nodes are fingerprinted.
    """

    def __init__(
        self, is_leased: Callable[[int], bool], withdraw: Callable[[Iterator[int]], None], page_bytes: int
    ) -> None:
        self._page_bytes = page_bytes
        self._is_leased = is_leased
        self._withdraw = withdraw
        self._roots: dict[bytes, PrefixNode] = {}
        self._clock = 0
        self._pushes = 0
        self._candidates: list[tuple[int, int, int, PrefixNode]] = []
        self._leased: dict[tuple[int, PrefixNode], None] = {}  # candidates passed over because they were in use
        self.num_nodes = 0

    def root(self, salt: str) -> PrefixNode:
        key = _salt_key(salt)
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = PrefixNode(None, key, [], [hash(key)])
        return root

    def walk(self, salt: str, raw: bytes, span_bytes: int, limit: int) -> list[PrefixNode]:
        """The nodes that hold the leading spans of `raw`, at most `limit`, nearest the root first."""
        node = self._roots.get(_salt_key(salt))
        path: list[PrefixNode] = []
        if node is None:
            return path
        for start in range(0, limit * span_bytes, span_bytes):
            node = node.children.get(raw[start : start + span_bytes])
            if node is None:
                break
            path.append(node)
        return path

    def touch(self, node: PrefixNode) -> None:
        """Marks a node as used now; its ancestors inherit that when it leaves."""
        self._clock += 1
        node.tick = self._clock

    def add(self, parent: PrefixNode, key: bytes, history: list[list[int]]) -> PrefixNode:
        """A new node below a live parent; its pages must be published already."""
        fingerprints = SeenPages.chain(parent.fingerprints[-1], key, self._page_bytes)
        node = PrefixNode(parent, key, history, fingerprints)
        parent.children[key] = node
        self.num_nodes += 1
        self.touch(node)
        self._push(LEAF, node)
        return node

    def offer_resume(self, node: PrefixNode) -> None:
        """Makes the node's Window pages and checkpoint candidates for eviction (call after attaching them)."""
        if node.has_resume:
            self._push(RESUME, node)

    def on_release(self, node: PrefixNode) -> None:
        """A request that ended at `node` released its pages: the node is a candidate again if it was passed over.

        A node that holds no pages, nor leads to one that does, was there for the request alone.
        """
        if node.parent is None:
            self._drop_root(node)
        elif node.alive and not node.children and not node.has_pages:
            self._remove(node)
        elif node.alive:
            self._push(LEAF, node)
            self._push(RESUME, node)

    def evict_one(self) -> bool:
        """Withdraws the least recently used leaf, or resume pages; False if no cached page is left."""
        for _ in range(2):
            while self._candidates:
                tick, _, kind, node = heapq.heappop(self._candidates)
                node.listed[kind] = False
                if not node.alive or (kind == LEAF and node.children) or (kind == RESUME and not node.has_resume):
                    continue
                if tick != node.tick:
                    self._push(kind, node)
                elif not self._can_evict(kind, node):
                    self._leased[kind, node] = None
                else:
                    if kind == RESUME:
                        self._drop_resume(node)
                    else:
                        self._remove(node)
                    return True
            # Only nodes that were leased when passed over are left: look at them once more.
            for kind, node in list(self._leased):
                self._push(kind, node)
        return False

    def _can_evict(self, kind: int, node: PrefixNode) -> bool:
        """True if it would free pages. A request leases the History of its whole path, so an idle leaf is nobody's."""
        if kind == LEAF and any(node.history):
            return not any(self._is_leased(page) for pages in node.history for page in pages)
        return not all(self._is_leased(page) for page in node.resume_pages())

    def nodes(self) -> Iterator[PrefixNode]:
        """Every node, roots excluded."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                yield node

    def _push(self, kind: int, node: PrefixNode) -> None:
        self._leased.pop((kind, node), None)
        if node.listed[kind]:
            return  # with an older tick, which is looked at again when it surfaces
        node.listed[kind] = True
        self._pushes += 1
        heapq.heappush(self._candidates, (node.tick, self._pushes, kind, node))

    def _drop_resume(self, node: PrefixNode) -> None:
        self._withdraw(node.resume_pages())
        node.windows = node.state = None
        if not node.has_pages and not node.children:
            self._remove(node)

    def _remove(self, node: PrefixNode) -> None:
        """Takes out a node without children, and each ancestor that this leaves without children and pages."""
        while True:
            parent = node.parent
            assert parent is not None and not node.children
            self._withdraw(node.pages())
            node.alive = False
            node.windows = node.state = None
            for kind in (LEAF, RESUME):
                self._leased.pop((kind, node), None)
            del parent.children[node.key]
            self.num_nodes -= 1
            parent.tick = max(parent.tick, node.tick)
            if parent.parent is None:
                self._drop_root(parent)
                return
            if parent.children:
                return
            if parent.has_pages:
                self._push(LEAF, parent)
                return
            node = parent

    def _drop_root(self, root: PrefixNode) -> None:
        """Forgets a salt of which nothing is cached; a request that still holds the root makes a new one."""
        if not root.children and self._roots.get(root.key) is root:
            del self._roots[root.key]
            root.alive = False


def _salt_key(salt: str) -> bytes:
    return salt.encode("utf-8", "surrogatepass")  # JSON strings may hold lone surrogates


class SeenPages:
    """Fingerprints of the pages computed most recently, whether they are still in the pool or not.

    A fingerprint chains over the whole prefix, so equal fingerprints stand for equal prefixes (64-bit hashes: a false
    match has odds of about 1e-13 a look-up at a million entries, and affects only the audit).
    """

    def __init__(self, capacity: int = 1_000_000) -> None:
        self._capacity = capacity
        self._seen: OrderedDict[int, None] = OrderedDict()  # finding a plain dict's oldest key scans deleted ones

    @staticmethod
    def chain(start: int, raw: bytes, page_bytes: int) -> list[int]:
        """Fingerprints of the complete pages of `raw` after a prefix with fingerprint `start`."""
        fingerprints = []
        value = start
        for offset in range(0, len(raw) - page_bytes + 1, page_bytes):
            value = hash((value, raw[offset : offset + page_bytes]))
            fingerprints.append(value)
        return fingerprints

    def count_leading(self, start: int, raw: bytes, page_bytes: int) -> int:
        """How many leading pages of `raw` have been seen after a prefix with fingerprint `start`."""
        value = start
        for offset in range(0, len(raw) - page_bytes + 1, page_bytes):
            value = hash((value, raw[offset : offset + page_bytes]))
            if value not in self._seen:
                return offset // page_bytes
        return len(raw) // page_bytes

    def add(self, fingerprints: list[int]) -> None:
        seen = self._seen
        for fingerprint in fingerprints:
            seen[fingerprint] = None
            seen.move_to_end(fingerprint)
        while len(seen) > self._capacity:
            seen.popitem(last=False)
