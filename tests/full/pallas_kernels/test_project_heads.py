"""The QKV product that turns and appends its heads, interpreted, against its parts in plain XLA."""

import pytest

from resin.pallas_kernels.dense_tiles import DenseTiles
from tests.pallas_kernels.grid import Point, check_project_heads

POINTS = [
    Point(64, 3, 0),
    Point(80, 7, 1),
    Point(128, 4, 2),
    Point(96, 1, 3),
    Point(64, 2, 4, fp8_scale=0.25),
    Point(128, 1, 5, fp8_scale=1.0),
]


@pytest.mark.parametrize("point", POINTS, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_matches_the_parts_and_writes_nothing_else(point, rows):
    check_project_heads(point, rows, interpret=True)


@pytest.mark.parametrize(
    "tiles", [DenseTiles(64, 64), DenseTiles(64, 32, splits=3), DenseTiles(64, 64, splits=2, transposed=True)], ids=str
)
def test_tiles_change_nothing(tiles):
    check_project_heads(Point(128, 4, 2), 20, interpret=True, tiles=tiles)


def test_counters_come_back_as_zeros():
    check_project_heads(Point(128, 4, 1), 3, interpret=True, tiles=DenseTiles(64, 64, splits=2))
