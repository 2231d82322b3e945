from __future__ import annotations

import numpy as np
import pytest

from resin.models.declare import Fused, FusedPart, Placement, Transposed
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
