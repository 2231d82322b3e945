from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from resin.models.axes import Axes
from resin.models.declare import Placement
from resin.models.norm import JointHeadNorm, NormOrder
from resin.models.weights import AbstractModel
from resin.plan.mapping import FrozenMapping

TOKENS, WIDTH, EPS = 5, 6, 1e-2


def joint_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    flat = x.reshape(TOKENS, -1).astype(np.float64)
    return (flat / np.sqrt((flat**2).mean(axis=1, keepdims=True) + EPS) * weight).reshape(x.shape)


@pytest.mark.parametrize("order", NormOrder)
@pytest.mark.parametrize(("heads", "devices"), [(3, 1), (4, 2), (8, 4), (2, 4)])
def test_heads_that_devices_share_are_normalised_together(heads: int, devices: int, order: NormOrder) -> None:
    """Two heads on four devices: each is on two of them, as where tp exceeds the KV heads."""
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((TOKENS, heads, WIDTH), heads * WIDTH))
    model = AbstractModel.of(JointHeadNorm(Placement(), "norm", heads, WIDTH, EPS, order))
    assert [declaration.sources for declaration in model.declarations] == [("norm.weight",)]
    axes = Axes(FrozenMapping({"tp": devices}))
    mesh = jax.make_mesh((devices,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    copies = max(devices // heads, 1)
    program = jax.shard_map(
        lambda weight, x: model.merge([weight])(axes, x),
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(None, "tp")),
        out_specs=PartitionSpec(None, "tp"),
        check_vma=False,
    )
    out = np.asarray(jax.jit(program)(jnp.asarray(weight), jnp.asarray(np.repeat(x, copies, axis=1))))
    np.testing.assert_allclose(out, np.repeat(joint_norm(x, weight), copies, axis=1), rtol=2e-6, atol=2e-6)
