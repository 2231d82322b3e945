"""Decode attention that makes and appends the new token itself, interpreted, against its parts in plain XLA."""

import pytest

from tests.pallas_kernels.grid import Point, check_append_and_attend

LENGTHS = [1, 17, 150, 0, 70]


@pytest.mark.parametrize(
    "point",
    [
        Point(64, 3, 0),
        Point(80, 7, 1),
        Point(128, 4, 2),
        Point(96, 1, 3),
        Point(64, 2, 4, fp8_scale=0.25),
        Point(128, 1, 5, fp8_scale=1.0),
    ],
    ids=str,
)
def test_matches_the_parts_and_writes_nothing_else(point):
    check_append_and_attend(point, LENGTHS, interpret=True)
