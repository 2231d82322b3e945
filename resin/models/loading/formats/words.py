"""Whole numbers of a few bits in words of 32, and what every format of groups makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from resin.models.loading.formats.packed_tensor import PackedFault, Read

WORD_BITS = 32
WORDS = ("int32", "uint32")
_CHUNK_ROWS = 1024  # of a result that are computed at once, so that temporaries stay small


def lanes_of(bits: int) -> int:
    """Numbers a word."""
    return WORD_BITS // bits


def unpack_words(words: np.ndarray, bits: int, *, axis: int, order: Sequence[int] | None = None) -> np.ndarray:
    """uint8 numbers of words `[m, n]`, side by side along an axis.

    Args:
        words: of 32 bits.
        bits: of each number; the first has the lowest.
        axis: 0 or 1, along which the numbers of a word lie.
        order: which number of its word each one is, from the lowest bits up; None for their order.
    """
    lanes = lanes_of(bits)
    shape = list(words.shape)
    shape[axis] *= lanes
    numbers = np.empty(shape, np.uint8)
    view = np.ascontiguousarray(words).view(np.uint32)
    for lane, place in enumerate(order or range(lanes)):
        part = (view >> np.uint32(lane * bits)) & np.uint32((1 << bits) - 1)
        numbers[(slice(place, None, lanes), slice(None)) if axis == 0 else (slice(None), slice(place, None, lanes))] = (
            part
        )
    return numbers


def words_around(start: int, stop: int, lanes: int) -> tuple[slice, slice]:
    """Words that hold numbers `start` to `stop`, and where these are among the numbers of those words."""
    first = start // lanes
    return slice(first, -(-stop // lanes)), slice(start - first * lanes, stop - first * lanes)


def read_groups(read: Read, name: str, start: int, stop: int, count: int) -> np.ndarray:
    """The group of each input from `start` to `stop`.

    Raises:
        PackedFault: there are only `count` groups.
    """
    groups = read(name, (slice(start, stop),)).astype(np.int64)
    if groups.min(initial=0) < 0 or groups.max(initial=0) >= count:
        raise PackedFault(f"{name} names groups from {groups.min()} to {groups.max()}, and there are {count}")
    return groups


def scale_groups(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """`(code - zero) * scale` with the zero and the scale of its group.

    Args:
        codes: uint8 `[in, out]`.
        zeros, scales: `[groups, out]`.
        groups: int `[in]`.

    Returns:
        float32 `[in, out]`. Exact for scales of 16 bits.
    """
    zeros, scales = zeros.astype(np.float32), scales.astype(np.float32)
    result = np.empty(codes.shape, np.float32)
    for start in range(0, len(codes), _CHUNK_ROWS):
        part = slice(start, start + _CHUNK_ROWS)
        np.subtract(codes[part], zeros[groups[part]], out=result[part])
        result[part] *= scales[groups[part]]
    return result
