"""The grid that GPU tests run, interpreted on small cases: a few points always, all of them among the slow tests."""

import pytest

from tests.pallas_kernels.grid import FP8_GRID, GRID, Point, check_append, check_decode, check_prefill

LENGTHS, QUERIES = [1, 17, 90, 5], [1, 10, 40, 5]
ALWAYS = {"decode": {(80, 7), (256, 2)}, "prefill": {(96, 3)}, "append": {(64, 16), (80, 4)}}


def points(kernel: str) -> list:
    return [
        pytest.param(
            point, id=str(point), marks=[] if (point.width, point.ratio) in ALWAYS[kernel] else pytest.mark.slow
        )
        for point in (*GRID, *FP8_GRID)
    ]


@pytest.mark.parametrize("point", points("decode"))
def test_decode(point: Point) -> None:
    check_decode(point, LENGTHS, interpret=True)


@pytest.mark.parametrize("point", points("prefill"))
def test_prefill(point: Point) -> None:
    check_prefill(point, LENGTHS, QUERIES, interpret=True)


@pytest.mark.parametrize("point", points("append"))
def test_append(point: Point) -> None:
    check_append(point, 21, interpret=True)
