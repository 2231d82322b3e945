"""Experts cut over devices: the same kernels, and the same result as on one device."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from resin.models.axes import Axes
from resin.models.declare import Placement
from resin.models.experts import ExpertSizes, MixtureOfExperts, joined_experts, listed_experts
from resin.models.forward import Pass, dense_pass
from resin.models.norm import RMSNorm
from resin.models.ops import pick_ops
from resin.models.routers import Router
from resin.models.weights import AbstractModel, dummy_weights
from resin.pallas_kernels.gates import SILU
from resin.pallas_kernels.route import RouteRule
from resin.pallas_kernels.table import Backend, pick_kernels
from resin.plan.mapping import FrozenMapping
from resin.topology import MeshShape

DEVICES, HIDDEN = 2, 64
SIZES = ExpertSizes(experts=4, top_k=2, hidden=HIDDEN, width=32)


def build_layer(placement: Placement, packed: bool) -> MixtureOfExperts:
    """Experts, and the norm before them as `norm`."""
    router = Router(placement, "gate", rule=RouteRule(2), hidden=HIDDEN, experts=SIZES.experts)
    if packed:
        layer = joined_experts(placement, "experts", SIZES, router=router, gate=SILU, packed=True)
    else:
        layer = listed_experts(placement, "experts", SIZES, ("w1", "w3", "w2"), router)
    layer.norm = RMSNorm(placement, "norm", HIDDEN, 1e-5)
    return layer


def build_program(
    tp: int, backend: Backend, packed: bool, tokens: int
) -> tuple[Callable[..., jax.Array], tuple[jax.Array, ...]]:
    """`(weights, x) -> out` over a mesh of `tp` devices, and weights; the last of several tokens is padding."""
    model = AbstractModel.of(build_layer(Placement("bfloat16", mesh=MeshShape(tp=tp)), packed))
    mesh = jax.make_mesh((tp,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:tp])
    held = dense_pass(jnp.zeros(tokens, jnp.int32)).tokens
    held = held._replace(live=jnp.arange(tokens) < max(1, tokens - 1))

    def forward(weights: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
        ops = pick_ops(pick_kernels("cpu", backend=backend))
        run = Pass(held, dense_pass(held.ids).cache, ops, Axes(FrozenMapping({"tp": tp})))
        layer = model.merge(weights)
        return layer(run, x, norm=layer.norm, residual=x)

    specs, whole = model.specs(mesh), PartitionSpec()
    mapped = jax.shard_map(forward, mesh=mesh, in_specs=(specs, whole), out_specs=whole, check_vma=False)
    return jax.jit(mapped), dummy_weights(model, mesh, seed=1)


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tokens", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_devices_share_the_experts(tokens: int, packed: bool) -> None:
    x = jax.random.normal(jax.random.key(0), (tokens, HIDDEN), jnp.bfloat16)
    alone, weights = build_program(1, Backend.REFERENCE, packed, tokens)
    expected = np.asarray(alone(weights, x), np.float32)
    assert np.abs(expected - np.asarray(x, np.float32))[: max(1, tokens - 1)].max() > 0.1
    for backend in (Backend.REFERENCE, Backend.INTERPRET):
        program, shared = build_program(DEVICES, backend, packed, tokens)
        text = str(jax.make_jaxpr(program)(shared, x))
        names = ("route_tokens", "experts_mxfp4" if packed else "grouped_product")
        assert all((name in text) == (backend is Backend.INTERPRET) for name in names)
        np.testing.assert_allclose(np.asarray(program(shared, x), np.float32), expected, rtol=0.03, atol=0.03)
