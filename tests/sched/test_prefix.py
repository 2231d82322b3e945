"""The prefix trie on a real pool: what is found, what leaves first, and that nothing piles up."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from resin.sched.pool import PagePool
from resin.sched.prefix import PrefixNode, PrefixTrie, SeenPages

SPAN = 2  # tokens a node


class Cached:
    """A trie whose nodes hold one History page each, none of them leased unless `lease` says so."""

    def __init__(self, num_pages: int = 5000) -> None:
        self.pool = PagePool(num_pages)
        self.trie = PrefixTrie(self.pool.is_leased, self.pool.withdraw, 4 * SPAN)

    def add(self, tokens: list[int], salt: str = "", *, history: bool = True) -> list[PrefixNode]:
        """The path of the tokens, nodes added where they lack."""
        node, path = self.trie.root(salt), []
        for start in range(0, len(tokens), SPAN):
            key = raw(tokens[start : start + SPAN])
            child = node.children.get(key)
            if child is None:
                child = self.trie.add(node, key, [self.page()] if history else [])
            path.append(child)
            node = child
        return path

    def page(self) -> list[int]:
        pages = self.pool.try_reserve(1)
        assert pages is not None
        self.pool.publish(pages)
        self.pool.release(pages)
        return pages

    def attach(self, node: PrefixNode, *, state: bool = False) -> None:
        if state:
            node.state = self.page()
        else:
            node.windows = [self.page()]
        self.trie.offer_resume(node)

    def lease(self, path: list[PrefixNode]) -> list[int]:
        """Reads the History of a path, as a request does."""
        pages = [page for node in path for page in node.history[0]]
        self.pool.retain(pages)
        return pages

    def check(self) -> None:
        published = np.zeros(self.pool.total + 1, np.bool_)
        for node in self.trie.nodes():
            pages = list(node.pages())
            assert not published[pages].any()
            published[pages] = True
        readers = np.array([int(self.pool.is_leased(page)) for page in range(self.pool.total + 1)])
        self.pool.check_integrity(readers, published)

    def found(self, tokens: list[int], salt: str = "") -> int:
        return len(self.trie.walk(salt, raw(tokens), 4 * SPAN, len(tokens) // SPAN))


def raw(tokens: list[int]) -> bytes:
    return np.asarray(tokens, np.int32).tobytes()


def test_a_walk_finds_exact_leading_spans_up_to_its_limit() -> None:
    cached = Cached()
    path = cached.add([1, 2, 3, 4, 5, 6])
    assert [node.key for node in path] == [raw([1, 2]), raw([3, 4]), raw([5, 6])]
    walk = cached.trie.walk
    assert walk("", raw([1, 2, 3, 4, 5, 6]), 8, 3) == path
    assert walk("", raw([1, 2, 3, 4, 5, 6]), 8, 2) == path[:2], "the limit keeps the last token to compute"
    assert walk("", raw([1, 2, 3, 9, 5, 6]), 8, 3) == path[:1]
    assert walk("", raw([2, 1, 3, 4]), 8, 2) == []
    assert walk("", raw([3, 4, 5, 6]), 8, 2) == [], "a span counts only after its own prefix"


def test_salts_share_nothing() -> None:
    cached = Cached()
    cached.add([1, 2, 3, 4], "one")
    assert cached.found([1, 2, 3, 4], "one") == 2
    assert cached.found([1, 2, 3, 4], "two") == cached.found([1, 2, 3, 4]) == 0


def test_the_least_recently_used_leaf_leaves_first() -> None:
    cached = Cached()
    old, middle, new = ([1, 1], [2, 2], [3, 3])
    first = cached.add(old)[0]
    cached.add(middle)
    cached.add(new)
    cached.trie.touch(first)
    gone = []
    while cached.trie.evict_one():
        gone += [tokens for tokens in (old, middle, new) if not cached.found(tokens) and tokens not in gone]
        cached.check()
    assert gone == [middle, new, old]
    assert cached.trie.num_nodes == 0 and cached.pool.free == cached.pool.total


def test_leaves_go_before_their_parents_and_pass_their_age_on() -> None:
    cached = Cached()
    path = cached.add([1, 2, 3, 4, 5, 6])
    other = cached.add([7, 7])[0]
    cached.trie.touch(path[-1])  # the deep leaf is newer than `other`, its ancestors are older
    assert cached.trie.evict_one() and not other.alive
    for node in reversed(path):
        assert node.alive
        assert cached.trie.evict_one() and not node.alive
    assert not cached.trie.evict_one()


def test_a_parent_is_as_old_as_its_latest_child() -> None:
    cached = Cached()
    stem, leaf = cached.add([1, 1, 2, 2])
    other = cached.add([7, 7])[0]
    cached.trie.touch(leaf)
    held = cached.lease([other])
    assert cached.trie.evict_one() and not leaf.alive, "the other one is older, but in use"
    cached.pool.release(held)
    cached.trie.on_release(other)
    assert cached.trie.evict_one() and not other.alive and stem.alive


def test_a_shared_ancestor_stays_while_a_child_does() -> None:
    cached = Cached()
    stem, left = cached.add([1, 1, 2, 2])
    right = cached.add([1, 1, 3, 3])[1]
    assert cached.trie.evict_one() and not left.alive and stem.alive
    assert cached.trie.evict_one() and not right.alive and stem.alive
    assert cached.trie.evict_one() and not stem.alive


@pytest.mark.parametrize("state", [False, True], ids=["window", "state"])
def test_resume_pages_leave_alone_and_history_stays(state: bool) -> None:
    cached = Cached()
    path = cached.add([1, 1, 2, 2, 3, 3])
    for node in path[:2]:
        cached.attach(node, state=state)
    free = cached.pool.free
    cached.trie.touch(path[0])
    assert cached.trie.evict_one() and not path[1].has_resume and path[1].alive, "the older resume pages go first"
    assert cached.pool.free == free + 1
    cached.check()
    assert cached.found([1, 1, 2, 2, 3, 3]) == 3


def test_leased_nodes_are_passed_over_and_found_again() -> None:
    cached = Cached()
    kept = cached.add([1, 1, 2, 2])
    pages = cached.lease(kept)
    idle = cached.add([5, 5])[0]
    assert cached.trie.evict_one() and not idle.alive
    for _ in range(3):
        assert not cached.trie.evict_one(), "everything left is in use"
    cached.check()
    cached.pool.release(pages)
    assert cached.trie.evict_one() and not kept[1].alive, "found again without being told"
    assert cached.trie.evict_one() and not kept[0].alive
    assert not cached.trie.evict_one()
    cached.check()


def test_a_released_node_is_a_candidate_before_newer_ones() -> None:
    cached = Cached()
    old = cached.add([1, 1])
    pages = cached.lease(old)
    for token in range(5, 9):
        cached.add([token, token])
    assert cached.trie.evict_one(), "passes the old one over"
    cached.pool.release(pages)
    cached.trie.on_release(old[0])
    assert cached.trie.evict_one() and not old[0].alive


def test_resume_pages_that_a_request_reads_are_withdrawn_only_if_others_come_free() -> None:
    cached = Cached()
    node = cached.add([1, 1])[0]
    cached.attach(node)
    history = cached.lease([node])
    assert node.windows is not None
    window = list(node.windows[0])
    cached.pool.retain(window)
    assert not cached.trie.evict_one(), "a reader holds all of it"
    cached.pool.release(window)
    assert cached.trie.evict_one() and node.windows is None and node.alive
    cached.pool.release(history)
    cached.check()


def test_nodes_without_history_leave_with_their_resume_pages() -> None:
    cached = Cached()
    path = cached.add([1, 1, 2, 2, 3, 3], history=False)
    for node in path:
        cached.attach(node, state=True)
    for left in (2, 1, 0):
        assert cached.trie.evict_one()
        assert sum(node.has_resume for node in cached.trie.nodes()) == left
    assert cached.trie.num_nodes == 0, "nodes that hold nothing are gone as well"
    assert not cached.trie.evict_one() and cached.pool.free == cached.pool.total


def test_a_chain_of_empty_nodes_of_any_length_leaves_at_once() -> None:
    cached = Cached()
    path = cached.add([1] * 2 * 4000, history=False)
    cached.attach(path[-1], state=True)
    assert cached.trie.evict_one()
    assert cached.trie.num_nodes == 0 and not path[0].alive


def test_roots_vanish_with_their_last_node_and_without_any() -> None:
    cached = Cached()
    for number in range(50):
        root = cached.trie.root(f"tenant {number}")
        cached.trie.on_release(root)  # a request too short to leave anything
        assert not root.alive
    stay = cached.trie.root("stays")
    cached.add([1, 1], "stays")
    cached.trie.on_release(stay)
    assert stay.alive and cached.found([1, 1], "stays") == 1
    assert cached.trie.evict_one() and not stay.alive
    again = cached.trie.root("stays")
    assert again is not stay and again.alive
    cached.trie.on_release(stay)
    assert again.alive, "the old root is not the new one"


def test_candidates_stay_few_however_often_a_prefix_is_reused() -> None:
    cached = Cached()
    path = cached.add([1, 1, 2, 2, 3, 3])
    cached.add([9, 9])
    for node in path:
        cached.attach(node)
    for _ in range(500):
        pages = cached.lease(path)
        cached.trie.touch(path[-1])
        if cached.pool.free % 2:
            cached.trie.evict_one()
        cached.pool.release(pages)
        cached.trie.on_release(path[-1])
    sizes = len(cached.trie._candidates) + len(cached.trie._leased)
    assert sizes <= 2 * (cached.trie.num_nodes + 4)


def test_random_use_agrees_with_a_plain_model() -> None:
    """Any order of additions, touches, leases and evictions: leaves only, never leased ones, pages exact."""
    draw = random.Random(3)
    cached = Cached(400)
    leases: list[tuple[list[PrefixNode], list[int]]] = []
    for _ in range(3000):
        choice = draw.random()
        if choice < 0.4 and cached.pool.free > 12:
            tokens = [draw.randrange(3) for _ in range(SPAN * draw.randrange(1, 6))]
            path = cached.add(tokens, draw.choice(["", "salt"]))
            if draw.random() < 0.5 and not path[-1].has_resume:
                cached.attach(path[-1], state=draw.random() < 0.5)
            cached.trie.touch(path[-1])
        elif choice < 0.6:
            nodes = list(cached.trie.nodes())
            if nodes:
                node, path = draw.choice(nodes), []
                while node.parent is not None:
                    path.insert(0, node)
                    node = node.parent
                leases.append((path, cached.lease(path)))
                cached.trie.touch(path[-1])
        elif choice < 0.8 and leases:
            path, pages = leases.pop(draw.randrange(len(leases)))
            cached.pool.release(pages)
            cached.trie.on_release(path[-1])
        else:
            cached_before = cached.pool.cached
            assert cached.trie.evict_one() == (cached_before > 0)
            assert cached.pool.cached < cached_before or not cached_before
        assert all(node.alive for path, _ in leases for node in path)
        assert sum(1 for _ in cached.trie.nodes()) == cached.trie.num_nodes
    for path, pages in leases:
        cached.pool.release(pages)
        cached.trie.on_release(path[-1])
    while cached.trie.evict_one():
        pass
    assert cached.pool.free == cached.pool.total and cached.trie.num_nodes == 0 and not cached.trie._roots


def test_seen_pages_remember_the_latest() -> None:
    seen, tokens = SeenPages(capacity=4), raw(list(range(12)))
    chain = SeenPages.chain(7, tokens, 8)
    assert len(chain) == 6 and len(set(chain)) == 6
    assert seen.count_leading(7, tokens, 8) == 0
    seen.add(chain[:3])
    assert seen.count_leading(7, tokens, 8) == 3
    assert seen.count_leading(7, tokens[:20], 8) == 2, "a partial page has none"
    assert seen.count_leading(6, tokens, 8) == 0
    seen.add(chain[:1])
    seen.add(chain[3:5])
    assert seen.count_leading(chain[0], tokens[8:], 8) == 0, "the least recent one is forgotten"
    assert seen.count_leading(7, tokens, 8) == 1 and seen.count_leading(chain[1], tokens[16:], 8) == 3


def test_fingerprints_chain_over_the_whole_prefix() -> None:
    tokens = raw([1, 2, 3, 4, 5, 6])
    chain = SeenPages.chain(0, tokens, 8)
    assert SeenPages.chain(0, tokens + raw([9]), 8) == chain, "a partial span has none"
    assert SeenPages.chain(chain[0], tokens[8:], 8) == chain[1:]
    assert SeenPages.chain(1, tokens, 8)[2] != chain[2]
    assert SeenPages.chain(0, raw([1, 9]) + tokens[8:], 8)[1] != chain[1]


def test_nodes_carry_the_fingerprints_of_their_pages() -> None:
    cached, tokens = Cached(), [1, 2, 3, 4, 5, 6]
    path = cached.add(tokens)
    start = cached.trie.root("").fingerprints[-1]
    assert [node.fingerprints[0] for node in path] == SeenPages.chain(start, raw(tokens), 4 * SPAN)
    other = cached.add(tokens, "salt")
    assert {node.fingerprints[0] for node in path}.isdisjoint(node.fingerprints[0] for node in other)


def test_forgetting_costs_no_more_than_remembering() -> None:
    """A full memory must not scan what it has forgotten."""

    def seconds(capacity: int) -> float:
        seen = SeenPages(capacity)
        seen.add(list(range(capacity)))
        started = time.process_time()
        for value in range(capacity, capacity + 60_000):
            seen.add([value])
        return time.process_time() - started

    assert seconds(100_000) < 5 * seconds(1_000) + 0.05
