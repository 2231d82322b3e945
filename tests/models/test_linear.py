from __future__ import annotations

import numpy as np
import pytest
from flax import nnx

from resin.models.assemblies import Deinterleaved, Joined, Same, whole
from resin.models.axes import Axis
from resin.models.declare import Placement
from resin.models.linear import Linear
from resin.models.loading.formats.mxfp4 import dequantise_mxfp4
from resin.models.packed import Mxfp4Tiles
from resin.models.weights import AbstractModel, read_share

E, INNER, WIDTH = 2, 64, 16


def held(linear: Linear, tensors: dict[str, np.ndarray]) -> Linear:
    """The matrices with values made of a checkpoint's tensors."""
    graph, _ = nnx.split(linear)
    model = AbstractModel.of(linear)
    arrays = [
        read_share(item, [tensors[name] for name in item.sources], item.shape, whole(item.shape))
        for item in model.declarations
    ]
    return nnx.merge(graph, arrays)


def test_parts_lie_side_by_side() -> None:
    rng = np.random.default_rng(0)
    gate, up = (rng.standard_normal((WIDTH, INNER)).astype(np.float32) for _ in range(2))
    linear = Linear(Placement(), ("g", "u"), (INNER, 2, WIDTH), assembly=Joined(2), axes=(None, None, Axis.FFN))
    (declaration,) = AbstractModel.of(linear).declarations
    assert (declaration.inner, declaration.flops_per_token) == (INNER, 4 * INNER * WIDTH)
    made = held(linear, {"g": gate, "u": up})
    np.testing.assert_array_equal(made.operand(), np.concatenate([gate, up]).T)
    np.testing.assert_array_equal(made.matrix("bfloat16"), np.concatenate([gate, up]).T.astype("bfloat16"))


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_packed_stack_decodes_to_the_plain_one(interleaved: bool) -> None:
    rng = np.random.default_rng(1)
    outer = (2, WIDTH) if interleaved else (WIDTH,)
    rows = int(np.prod(outer))
    blocks = rng.integers(0, 256, (E, rows, INNER // 32, 16)).astype(np.uint8)
    scales = rng.integers(115, 122, (E, rows, INNER // 32)).astype(np.uint8)
    tensors = {"w": dequantise_mxfp4(blocks, scales), "w_blocks": blocks, "w_scales": scales}
    assembly = Deinterleaved() if interleaved else Same()
    axes = (Axis.EXPERTS, *(None for _ in range(1 + len(outer))))
    shape = (E, INNER, *outer)
    plain, packed = (
        held(Linear(Placement(), "w", shape, assembly=assembly, axes=axes, is_stack=True, **options), tensors)
        for options in ({}, {"format": Mxfp4Tiles(interleaved)})
    )
    np.testing.assert_array_equal(packed.matrix("float32"), plain.matrix("float32"))
