"""Collectives of a program, counted in its HLO: what devices tell each other in one step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

KINDS = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
_CALL = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(?:-start)?\(")
_SHAPE = re.compile(r"([a-z]+)(\d+)?(?:e\d+m\d+\w*)?\[([\d,]*)\]")


class Collectives(NamedTuple):
    """Calls of one kind, and bytes of what they leave on a device together."""

    calls: int
    nbytes: int


def count_collectives(hlo: str) -> Mapping[str, Collectives]:
    """By kind, of the text of an HLO module; kinds that it does not call are left out."""
    found: dict[str, Collectives] = {}
    for shapes, kind in _CALL.findall(hlo):
        calls, nbytes = found.get(kind, (0, 0))
        found[kind] = Collectives(calls + 1, nbytes + sum(map(_nbytes, _SHAPE.findall(shapes))))
    return found


def _nbytes(shape: tuple[str, str, str]) -> int:
    """Of an array such as bf16[2,64]; a bool is a byte."""
    _, bits, sizes = shape
    return int(np.prod([int(size) for size in sizes.split(",") if size], dtype=np.int64)) * int(bits or 8) // 8
