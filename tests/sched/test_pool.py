"""The page pool: free + leased + cached == total, and nobody gets a page twice."""

from __future__ import annotations

import random

import numpy as np
import pytest

from resin.sched.pool import PagePool


def taken(pool: PagePool, count: int) -> list[int]:
    pages = pool.try_reserve(count)
    assert pages is not None
    return pages


def counts(pool: PagePool) -> tuple[int, int, int]:
    assert pool.free + pool.leased + pool.cached == pool.total
    return pool.free, pool.leased, pool.cached


def test_the_scratch_page_is_never_handed_out() -> None:
    pool = PagePool(5)
    assert pool.total == 4 and sorted(taken(pool, 4)) == [1, 2, 3, 4]
    assert PagePool(0).total == PagePool(1).total == 0


def test_all_or_nothing() -> None:
    pool = PagePool(4)
    assert pool.try_reserve(4) is None and counts(pool) == (3, 0, 0)
    assert pool.try_reserve(0) == [] and counts(pool) == (3, 0, 0)
    first = taken(pool, 2)
    assert pool.try_reserve(2) is None and counts(pool) == (1, 2, 0)
    assert not set(taken(pool, 1)) & set(first)


def test_the_life_of_a_shared_page() -> None:
    pool = PagePool(2)
    pages = taken(pool, 1)
    page = pages[0]
    assert pool.is_leased(page) and pool.is_writable(page) and counts(pool) == (0, 1, 0)
    pool.publish(pages)
    assert not pool.is_writable(page) and counts(pool) == (0, 1, 0)
    pool.retain(pages)
    pool.release(pages)
    assert pool.is_leased(page) and counts(pool) == (0, 1, 0)
    pool.release(pages)
    assert not pool.is_leased(page) and counts(pool) == (0, 0, 1) and pool.try_reserve(1) is None
    pool.retain(pages)
    assert counts(pool) == (0, 1, 0) and not pool.is_writable(page)
    pool.withdraw(pages)
    assert counts(pool) == (0, 1, 0) and pool.is_writable(page), "one reader left, and the trie let go"
    pool.release(pages)
    assert counts(pool) == (1, 0, 0)


def test_a_page_with_two_readers_is_nobodys_to_write() -> None:
    pool = PagePool(2)
    pages = taken(pool, 1)
    pool.publish(pages)
    pool.retain(pages)
    pool.withdraw(pages)
    assert not pool.is_writable(pages[0])
    pool.release(pages)
    assert pool.is_writable(pages[0])


def test_withdrawing_a_cached_page_frees_it() -> None:
    pool = PagePool(3)
    pages = taken(pool, 2)
    pool.publish(pages)
    pool.release(pages)
    pool.withdraw(pages[:1])
    assert counts(pool) == (1, 0, 1) and taken(pool, 1) == pages[:1]


def test_a_page_may_be_named_as_often_as_it_has_readers() -> None:
    pool = PagePool(2)
    pages = taken(pool, 1)
    pool.publish(pages)
    pool.retain(pages * 2)
    pool.release(pages * 3)
    assert counts(pool) == (0, 0, 1)


def test_mistakes_of_the_owner_are_caught() -> None:
    pool = PagePool(3)
    pages = taken(pool, 1)
    pool.release(pages)
    with pytest.raises(AssertionError):
        pool.release(pages)
    with pytest.raises(AssertionError):
        pool.publish(pages)
    with pytest.raises(AssertionError):
        pool.withdraw(pages)


def test_random_use_against_plain_counts() -> None:
    draw = random.Random(5)
    pool = PagePool(30)
    readers: dict[int, int] = {}
    published: set[int] = set()
    for _ in range(4000):
        choice = draw.random()
        held = [page for page, count in readers.items() if count]
        if choice < 0.3:
            want = draw.randrange(5)
            got = pool.try_reserve(want)
            assert (got is None) == (want > 29 - len({*held, *published}))
            for page in got or ():
                assert not readers.get(page) and page not in published and page
                readers[page] = 1
        elif choice < 0.5 and held:
            page = draw.choice(held)
            pool.release([page])
            readers[page] -= 1
        elif choice < 0.65 and published:
            page = draw.choice(sorted(published))
            pool.retain([page])
            readers[page] = readers.get(page, 0) + 1
        elif choice < 0.8:
            own = [page for page in held if page not in published]
            if own:
                page = draw.choice(own)
                pool.publish([page])
                published.add(page)
        elif published:
            page = draw.choice(sorted(published))
            pool.withdraw([page])
            published.remove(page)
        expected_readers = np.array([readers.get(page, 0) for page in range(30)])
        expected_published = np.array([page in published for page in range(30)])
        pool.check_integrity(expected_readers, expected_published)


@pytest.mark.parametrize("wrong", ["readers", "published"])
def test_the_integrity_check_sees_differences(wrong: str) -> None:
    pool = PagePool(4)
    pages = taken(pool, 1)
    readers, published = np.zeros(4, np.int64), np.zeros(4, np.bool_)
    readers[pages] = 1
    pool.check_integrity(readers, published)
    if wrong == "readers":
        readers[pages] = 2
    else:
        published[pages] = True
    with pytest.raises(AssertionError):
        pool.check_integrity(readers, published)


@pytest.mark.parametrize("published", [False, True], ids=["nothing shared", "one page published"])
def test_a_row_that_is_released_twice_is_noticed(published: bool) -> None:
    pool = PagePool(40)
    pages = pool.try_reserve(20)
    other = pool.try_reserve(1)
    assert pages is not None and other is not None
    if published:
        pool.publish(other)
    row = np.asarray(pages, np.int32)
    pool.release_row(row)
    assert pool.free == 38 and pool.leased == 1
    with pytest.raises(AssertionError, match="more often"):
        pool.release_row(row)
