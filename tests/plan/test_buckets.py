"""Buckets: what holds what, and which one a plan takes."""

from __future__ import annotations

import pytest

from resin import Bucket, Phase
from resin.plan import smallest_bucket

TABLE = (
    Bucket(Phase.PREFILL, 2, 16, (8, 0)),
    Bucket(Phase.PREFILL, 4, 64, (32, 0)),
    Bucket(Phase.DECODE, 1, 1, (8, 0)),
    Bucket(Phase.DECODE, 4, 4, (32, 0)),
)


@pytest.mark.parametrize(
    ("phase", "sequences", "tokens", "pages", "index"),
    [
        (Phase.PREFILL, 1, 1, (1, 0), 0),
        (Phase.PREFILL, 2, 16, (8, 0), 0),
        (Phase.PREFILL, 3, 16, (8, 0), 1),
        (Phase.PREFILL, 2, 17, (8, 0), 1),
        (Phase.PREFILL, 2, 16, (9, 0), 1),
        (Phase.PREFILL, 4, 64, (32, 0), 1),
        (Phase.PREFILL, 5, 64, (32, 0), None),
        (Phase.PREFILL, 4, 65, (32, 0), None),
        (Phase.PREFILL, 4, 64, (33, 0), None),
        (Phase.PREFILL, 1, 1, (1, 1), None),
        (Phase.DECODE, 1, 1, (8, 0), 2),
        (Phase.DECODE, 1, 1, (9, 0), 3),
        (Phase.DECODE, 4, 4, (32, 0), 3),
        (Phase.DECODE, 4, 5, (32, 0), None),
    ],
)
def test_the_first_bucket_that_holds_every_count(
    phase: Phase, sequences: int, tokens: int, pages: tuple[int, ...], index: int | None
) -> None:
    found = smallest_bucket(TABLE, phase, sequences, tokens, pages)
    assert found is (None if index is None else TABLE[index])


def test_without_a_table_plans_keep_their_size() -> None:
    assert smallest_bucket((), Phase.DECODE, 3, 3, [5]) == Bucket(Phase.DECODE, 3, 3, (5,))


def test_page_counts_are_one_for_each_group() -> None:
    with pytest.raises(ValueError):
        TABLE[0].holds(1, 1, (1,))


def test_a_bucket_names_itself() -> None:
    assert str(TABLE[1]) == "prefill 4x64 (32+0 pages)"
    assert str(Bucket(Phase.DECODE, 2, 2, ())) == "decode 2x2 (0 pages)"
