from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from resin.models.axes import Axes
from resin.models.declare import Placement
from resin.models.norm import EachHeadLayerNorm, HeadsNorm, JointHeadNorm, LayerNorm, NormOrder
from resin.models.weights import AbstractModel
from resin.plan.mapping import FrozenMapping

TOKENS, WIDTH, EPS = 5, 6, 1e-2


def joint_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    flat = x.reshape(TOKENS, -1).astype(np.float64)
    return (flat / np.sqrt((flat**2).mean(axis=1, keepdims=True) + EPS) * weight).reshape(x.shape)


def each_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + EPS)
    return scaled * weight.reshape(-1, WIDTH)


def test_layer_norm_takes_the_mean_away_first() -> None:
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal(shape).astype(np.float32) + 2 for shape in ((TOKENS, WIDTH), WIDTH))
    model = AbstractModel.of(LayerNorm(Placement(), "norm", WIDTH, EPS))
    found = model.merge([jnp.asarray(weight)])(jnp.asarray(x))
    np.testing.assert_allclose(found, each_norm(x[:, None], weight)[:, 0], rtol=2e-6, atol=2e-6)
    rounded = model.merge([jnp.asarray(weight, jnp.bfloat16)])(jnp.asarray(x * 300 + 1e4, jnp.bfloat16))
    exact = each_norm(np.asarray(jnp.asarray(x * 300 + 1e4, jnp.bfloat16), np.float64)[:, None], weight)[:, 0]
    np.testing.assert_allclose(np.asarray(rounded, np.float64), exact, rtol=0.02, atol=0.02)


NORMS = [(JointHeadNorm, joint_norm), (EachHeadLayerNorm, each_norm)]


@pytest.mark.parametrize(("kind", "expected"), NORMS)
@pytest.mark.parametrize("order", NormOrder)
@pytest.mark.parametrize(("heads", "devices"), [(3, 1), (4, 2), (8, 4), (2, 4)])
def test_heads_that_devices_share_are_normalised_as_on_one(
    heads: int, devices: int, order: NormOrder, kind: type[HeadsNorm], expected: Callable[..., np.ndarray]
) -> None:
    """Two heads on four devices: each is on two of them, as where tp exceeds the KV heads."""
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((TOKENS, heads, WIDTH), heads * WIDTH))
    weight = weight.reshape(heads, WIDTH) if kind.in_rows else weight
    model = AbstractModel.of(kind(Placement(), "norm", heads, WIDTH, EPS, order))
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
    np.testing.assert_allclose(out, np.repeat(expected(x, weight), copies, axis=1), rtol=2e-6, atol=2e-6)
