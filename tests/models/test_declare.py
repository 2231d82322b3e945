from __future__ import annotations

import numpy as np
import pytest

from resin.models.declare import (
    Channels,
    Deinterleaved,
    Fused,
    FusedPart,
    OnePlus,
    Placement,
    Sections,
    Stacked,
    Transposed,
)
from resin.plan import InvalidRequest


def test_fused_columns_split_evenly_over_devices() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((heads * 3, 5)).astype(np.float32) for heads in (4, 2, 2))
    fused = Fused((FusedPart(4, 3), FusedPart(2, 3), FusedPart(2, 3)), tp=2)
    out = np.empty((5, fused.columns()), np.float32)
    fused.fill(out, [q, k, v])
    for device in range(2):
        share = out[:, device * 12 : (device + 1) * 12]
        np.testing.assert_array_equal(share[:, :6], q[device * 6 : device * 6 + 6].T)
        np.testing.assert_array_equal(share[:, 6:9], k[device * 3 : device * 3 + 3].T)
        np.testing.assert_array_equal(share[:, 9:], v[device * 3 : device * 3 + 3].T)


def test_fused_repeats_blocks_that_are_fewer_than_devices() -> None:
    k = np.arange(2 * 3 * 5, dtype=np.float32).reshape(6, 5)
    fused = Fused((FusedPart(2, 3),), tp=4)
    out = np.empty((5, fused.columns()), np.float32)
    fused.fill(out, [k])
    for device, head in enumerate((0, 0, 1, 1)):
        np.testing.assert_array_equal(out[:, device * 3 : device * 3 + 3], k[head * 3 : head * 3 + 3].T)


def test_transposed_casts_while_filling() -> None:
    tensor = np.arange(6, dtype=np.float32).reshape(2, 3)
    out = np.empty((3, 2), np.float16)
    Transposed().fill(out, [tensor])
    np.testing.assert_array_equal(out, tensor.T.astype(np.float16))


def test_placement_refuses_uneven_heads() -> None:
    with pytest.raises(InvalidRequest, match="num_attention_heads=9"):
        Placement(tp=2).split("num_attention_heads", 9)
    with pytest.raises(InvalidRequest, match="num_key_value_heads=3"):
        Placement(tp=2).split_kv(3)
    assert [Placement(tp=tp).split_kv(2) for tp in (1, 2, 4)] == [2, 1, 1]


def test_sections_split_one_tensor_into_parts() -> None:
    joined = np.arange(6 * 5, dtype=np.float32).reshape(6, 5)
    sections = Sections(Fused((FusedPart(2, 1),) * 3, tp=2))
    assert sections.source_shapes((5, 6)) == ((6, 5),)
    out = np.empty((5, 6), np.float32)
    sections.fill(out, [joined])
    np.testing.assert_array_equal(out.T, joined[[0, 2, 4, 1, 3, 5]])


def test_stacked_fills_one_weight_an_index() -> None:
    tensors = [np.full((2, 3), index, np.float32) for index in range(4)]
    stacked = Stacked(Fused((FusedPart(1, 2),) * 2, tp=1), count=2)
    assert stacked.source_shapes((2, 3, 4)) == ((2, 3),) * 4
    out = np.empty((2, 3, 4), np.float32)
    stacked.fill(out, tensors)
    np.testing.assert_array_equal(out[:, 0], [[0, 0, 1, 1], [2, 2, 3, 3]])


def test_deinterleaved_puts_even_places_first() -> None:
    out = np.empty((1, 4, 2), np.uint8)
    Deinterleaved(axis=1).fill(out, [np.arange(8, dtype=np.uint8).reshape(1, 4, 2)])
    np.testing.assert_array_equal(out[0], [[0, 1], [4, 5], [2, 3], [6, 7]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_one_plus_adds_in_float32_and_is_undone(dtype: str) -> None:
    stored = np.linspace(-2, 3, 101).astype(dtype)
    out = np.empty(101, np.float32)
    OnePlus().fill(out, [stored])
    np.testing.assert_array_equal(out, np.float32(1) + stored.astype(np.float32))
    (back,) = OnePlus().take_apart(out)
    again = np.empty_like(out)
    OnePlus().fill(again, [back])
    np.testing.assert_array_equal(again, out)


def test_channels_turns_filters_over() -> None:
    assert Channels().source_shapes((3, 8)) == ((8, 1, 3),)
    out = np.empty((3, 2), np.float32)
    Channels().fill(out, [np.arange(6, dtype=np.float32).reshape(2, 1, 3)])
    np.testing.assert_array_equal(out, [[0, 3], [1, 4], [2, 5]])
