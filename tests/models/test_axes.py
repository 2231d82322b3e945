"""Collectives of logical axes equal the arithmetic of one device."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from resin.models.axes import Axes, Axis
from resin.plan.mapping import FrozenMapping


def mapped(
    function: Callable[..., jax.Array], arguments: PartitionSpec, result: PartitionSpec
) -> Callable[..., jax.Array]:
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:8])
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=arguments, out_specs=result, check_vma=False))


def test_one_device_needs_no_collective() -> None:
    axes, x = Axes(FrozenMapping({"tp": 1})), np.ones((3, 4), np.float32)
    for method in (axes.enter, axes.leave, axes.join):
        assert method(x, Axis.HEADS) is x
    assert (axes.size(Axis.VOCAB), axes.index(Axis.VOCAB), axes.mesh_axes(Axis.KV)) == (1, 0, ())


@pytest.mark.parametrize("axis", list(Axis))
def test_every_logical_axis_has_a_rule(axis: Axis) -> None:
    assert Axes(FrozenMapping({"dp": 2, "tp": 4})).size(axis) == (8 if axis is Axis.EXPERTS else 4)


def test_shares_join_side_by_side_in_the_order_of_the_devices() -> None:
    axes, x = Axes(FrozenMapping({"dp": 2, "tp": 4})), np.arange(24, dtype=np.float32).reshape(3, 8)
    join = mapped(lambda share: axes.join(share, Axis.VOCAB), PartitionSpec(None, "tp"), PartitionSpec())
    np.testing.assert_array_equal(join(x), x)


@pytest.mark.parametrize("tokens", [(), ("dp",)])
def test_a_cut_product_equals_the_whole_one(tokens: tuple[str, ...]) -> None:
    """Experts are cut over both axes of the mesh; tokens may be cut over one of them."""
    axes = Axes(FrozenMapping({"dp": 2, "tp": 4}), tokens=tokens)
    rng = np.random.default_rng(0)
    x, weights = rng.standard_normal((6, 5), np.float32), rng.standard_normal((8, 5, 7), np.float32)

    def product(x: jax.Array, weights: jax.Array) -> jax.Array:
        whole = axes.enter(x, Axis.EXPERTS)
        factor = (1 + axes.index(Axis.EXPERTS)).astype(x.dtype)
        return axes.leave(whole @ weights[0] * factor, Axis.EXPERTS)

    rows = PartitionSpec(*tokens)
    got = mapped(product, (rows, PartitionSpec(("dp", "tp"))), rows)(x, weights)
    expected = sum((index + 1) * (x @ weight) for index, weight in enumerate(weights))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
