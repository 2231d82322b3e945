from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from resin.models.assemblies import (
    Assembly,
    Channels,
    Deinterleaved,
    Joined,
    JoinedHeads,
    OnePlus,
    Piled,
    Reordered,
    Same,
    Sections,
    Shape,
    Stacked,
    Transposed,
    whole,
)
from resin.models.packed import Factors, PackedRows, Units, Words
from resin.pallas_kernels.mxfp4 import packed_shapes


def filled(assembly: Assembly, shape: Shape, tensors: Sequence[np.ndarray], dtype: str = "float32") -> np.ndarray:
    assert assembly.source_shapes(shape) == tuple(tensor.shape for tensor in tensors)
    out = np.empty(shape, dtype)
    assembly.fill(out, tensors, whole(shape))
    return out


def numbered(*shapes: Shape) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def test_joined_heads_keep_each_kv_head_with_its_queries() -> None:
    q, k, v = numbered((12, 5), (6, 5), (6, 5))
    out = filled(JoinedHeads(2, 2, 3), (5, 2, 4, 3), [q, k, v])
    for head in range(2):
        for query in range(2):
            start = (head * 2 + query) * 3
            np.testing.assert_array_equal(out[:, head, query], q[start : start + 3].T)
        np.testing.assert_array_equal(out[:, head, 2], k[head * 3 : head * 3 + 3].T)
        np.testing.assert_array_equal(out[:, head, 3], v[head * 3 : head * 3 + 3].T)
    biases = [tensor[:, 0].copy() for tensor in (q, k, v)]
    np.testing.assert_array_equal(filled(JoinedHeads(2, 2, 3), (2, 4, 3), biases), out[0])


def test_lanes_of_queries_and_keys_are_reordered_and_those_of_values_are_not() -> None:
    tensors = numbered((12, 5), (6, 5), (6, 5))
    plain = filled(JoinedHeads(2, 2, 3), (5, 2, 4, 3), tensors)
    out = filled(JoinedHeads(2, 2, 3, (2, 0, 1)), (5, 2, 4, 3), tensors)
    np.testing.assert_array_equal(out[:, :, :3], plain[:, :, :3][..., [2, 0, 1]])
    np.testing.assert_array_equal(out[:, :, 3], plain[:, :, 3])
    (norm,) = numbered((3,))
    np.testing.assert_array_equal(filled(Reordered((2, 0, 1)), (3,), [norm]), norm[[2, 0, 1]])


def test_joined_puts_parts_side_by_side() -> None:
    gate, up = numbered((4, 3), (4, 3))
    out = filled(Joined(2), (3, 2, 4), [gate, up])
    np.testing.assert_array_equal(out[:, 0], gate.T)
    np.testing.assert_array_equal(out[:, 1], up.T)


def test_transposed_casts_while_filling() -> None:
    (tensor,) = numbered((2, 3))
    np.testing.assert_array_equal(filled(Transposed(), (3, 2), [tensor], "float16"), tensor.T.astype(np.float16))


def test_sections_split_one_tensor_into_parts() -> None:
    (joined,) = numbered((6, 5))
    out = filled(Sections(Joined(3), (2, 2, 2)), (5, 3, 2), [joined])
    np.testing.assert_array_equal(out, np.moveaxis(joined.reshape(3, 2, 5), -1, 0))


def test_stacked_fills_one_weight_an_index() -> None:
    tensors = [np.full((2, 3), index, np.float32) for index in range(4)]
    out = filled(Stacked(Joined(2), count=2), (2, 3, 2, 2), tensors)
    np.testing.assert_array_equal(out[:, 0, :, 0], [[0, 1], [2, 3]])


def test_piled_takes_one_sheet_an_index() -> None:
    (pile,) = numbered((4, 6, 5))
    out = filled(Piled(Sections(Joined(2), (3, 3)), 4), (4, 5, 2, 3), [pile])
    np.testing.assert_array_equal(out[1, :, 0], pile[1, :3].T)
    np.testing.assert_array_equal(out[3, :, 1], pile[3, 3:].T)


def test_deinterleaved_parts_even_and_odd_places() -> None:
    out = filled(Deinterleaved(), (1, 2, 2, 3), [np.arange(12, dtype=np.float32).reshape(1, 2, 6)])
    np.testing.assert_array_equal(out[0, 0], [[0, 2, 4], [1, 3, 5]])
    np.testing.assert_array_equal(out[0, 1], [[6, 8, 10], [7, 9, 11]])


def test_channels_turns_filters_over() -> None:
    out = filled(Channels(), (3, 2), [np.arange(6, dtype=np.float32).reshape(2, 1, 3)])
    np.testing.assert_array_equal(out, [[0, 3], [1, 4], [2, 5]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_one_plus_adds_in_float32_and_is_undone(dtype: str) -> None:
    stored = np.linspace(-2, 3, 101).astype(dtype)
    out = filled(OnePlus(), (101,), [stored])
    np.testing.assert_array_equal(out, np.float32(1) + stored.astype(np.float32))
    (back,) = OnePlus().take_apart(out)
    np.testing.assert_array_equal(filled(OnePlus(), (101,), [back]), out)


class Watched:
    """A tensor that counts what is read of it."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.read = array, 0

    def __getitem__(self, window: tuple[slice, ...]) -> np.ndarray:
        part = self.array[window]
        self.read += part.size
        return part


ROWS = PackedRows(32, interleaved=True)
PACKED = packed_shapes(4, 16, 32)
CASES: dict[str, tuple[Assembly, Shape]] = {
    "same": (Same(), (4, 6)),
    "transposed": (Transposed(), (4, 6)),
    "one plus": (OnePlus(), (8,)),
    "joined": (Joined(2), (4, 2, 6)),
    "joined biases": (Joined(2), (2, 6)),
    "joined heads": (JoinedHeads(2, 3, 4), (6, 2, 5, 4)),
    "reordered heads": (JoinedHeads(2, 3, 4, (0, 2, 1, 3)), (6, 2, 5, 4)),
    "reordered": (Reordered((3, 1, 0, 2)), (4,)),
    "reordered rows": (Reordered((3, 1, 0, 2)), (6, 4)),
    "joined head biases": (JoinedHeads(2, 3, 4), (2, 5, 4)),
    "sections": (Sections(Joined(3), (4, 4, 4)), (6, 3, 4)),
    "sections of heads": (Sections(JoinedHeads(2, 3, 4), (24, 8, 8)), (6, 2, 5, 4)),
    "channels": (Channels(), (3, 8)),
    "piled": (Piled(Sections(Joined(2), (4, 4)), 4), (4, 6, 2, 4)),
    "stacked": (Stacked(Joined(2), 4), (4, 6, 2, 4)),
    "deinterleaved": (Deinterleaved(), (4, 6, 2, 4)),
}
EXPERTS: dict[str, tuple[Assembly, Shape]] = {
    "words": (Words(ROWS), PACKED[0]),
    "factors": (Factors(ROWS), PACKED[1]),
    "units": (Units(16, ROWS), PACKED[2]),
}


@pytest.mark.parametrize("name", CASES | EXPERTS)
def test_a_window_is_filled_from_its_own_numbers(name: str) -> None:
    """Every window of halves along every dimension: what is read is what is written."""
    assembly, shape = (CASES | EXPERTS)[name]
    rng = np.random.default_rng(1)
    dtype = np.uint8 if name in EXPERTS else np.float32
    tensors = [rng.integers(100, 140, part).astype(dtype) for part in assembly.source_shapes(shape)]
    out_dtype = np.int32 if name in ("words", "factors") else np.float32
    everything = np.empty(shape, out_dtype)
    assembly.fill(everything, tensors, whole(shape))
    cuts = [[slice(0, size)] if size == 1 else [slice(0, size // 2), slice(size // 2, size)] for size in shape]
    for window in itertools.product(*cuts):
        watched = [Watched(tensor) for tensor in tensors]
        out = np.empty_like(everything[window])
        assembly.fill(out, watched, window)
        np.testing.assert_array_equal(out, everything[window])
        read, size = sum(tensor.read for tensor in watched), sum(tensor.size for tensor in tensors)
        if name in CASES and name != "deinterleaved" and not name.startswith("reordered"):
            assert read == out.size
        if name.startswith("reordered"):  # what lies between lanes is read with them; no mesh cuts a head's lanes
            assert read <= 2 * out.size
            continue
        # Packed codes are read by the expert, pairs of interleaved columns by the pair.
        assert read <= size * (window[0].stop - window[0].start) / shape[0]
