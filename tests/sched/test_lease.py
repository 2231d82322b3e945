"""Page rows that grow and cycle, and rings of states."""

from __future__ import annotations

import random

import numpy as np

from resin.sched.lease import CacheLease, PageRow, StateRing


def test_a_row_against_a_plain_list() -> None:
    draw = random.Random(1)
    for _ in range(30):
        start = [draw.randrange(100) for _ in range(draw.randrange(12))]
        first = draw.randrange(5)
        row, plain = PageRow(first, np.asarray(start, np.int32)), list(start)
        for _ in range(200):
            choice = draw.random()
            if choice < 0.3:
                pages = [draw.randrange(100) for _ in range(draw.randrange(4))]
                row.append(pages)
                plain += pages
            elif choice < 0.6:
                row.append_one(choice_page := draw.randrange(100))
                plain.append(choice_page)
            elif choice < 0.7:
                count = draw.randrange(len(plain) + 1) // 2
                row.drop_last(count)
                plain = plain[: len(plain) - count]
            elif choice < 0.85:
                logical = first + draw.randrange(-2, 6)
                gone = max(min(logical - first, len(plain)), 0)
                assert row.drop_before(logical) == plain[:gone]
                plain, first = plain[gone:], first + gone
            elif plain:
                place = draw.randrange(len(plain))
                plain[place] = page = draw.randrange(100)
                row.replace(first + place, page)
            assert row.view().tolist() == plain and row.view().dtype == np.int32
            assert (len(row), row.first, row.end) == (len(plain), first, first + len(plain))
            assert [row.at(first + i) for i in range(len(plain))] == plain
            for skip in (-1, 0, 1, len(plain)):
                assert row.view(first + skip).tolist() == plain[max(skip, 0) :]
            if plain:
                assert row.last_page == plain[-1]


def test_an_older_view_keeps_its_pages_when_the_row_grows() -> None:
    row = PageRow()
    for page in range(8):
        row.append_one(page)
    view = row.view()
    row.append(list(range(8, 40)))
    row.drop_before(5)
    assert view.tolist() == list(range(8))


def test_a_ring_finds_the_state_of_a_position() -> None:
    ring = StateRing()
    assert ring.at(0, 0) is None
    ring.advance(0, [1, 2])
    assert ring.held == [] and ring.at(7, 7) == [1, 2]
    ring.advance(16, [3, 4])
    ring.advance(32, [5, 6])
    assert ring.at(16, 40) == [1, 2] and ring.at(32, 40) == [3, 4] and ring.at(40, 40) == [5, 6]
    assert ring.at(48, 40) is None and ring.at(0, 40) is None


def test_a_lease_lists_each_of_its_pages_once() -> None:
    ring = StateRing()
    ring.advance(0, [9])
    ring.advance(16, [10])
    lease = CacheLease([PageRow(0, np.array([1, 2], np.int32)), PageRow()], [ring, StateRing()], None, 0)
    assert sorted(lease.pages()) == [1, 2, 9, 10]
