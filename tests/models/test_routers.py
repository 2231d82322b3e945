from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from resin.models.declare import Placement
from resin.models.forward import Pass, dense_pass
from resin.models.norm import RMSNorm
from resin.models.ops import pick_ops
from resin.models.routers import Router
from resin.pallas_kernels.route import RouteRule
from resin.pallas_kernels.table import ROUTE_ROWS, Backend, pick_kernels
from resin.plan import InvalidRequest

SIZES = {"hidden": 4, "experts": 4}
SCORES = np.array([[2.0, 1.0, 2.0, -1.0]], np.float32)


def filled(router: Router, **biases: np.ndarray) -> Router:
    """The router with an identity product, so that its scores are its input."""
    graph, state = nnx.split(router)
    values = {("gate",): jnp.eye(4), **{(name,): jnp.asarray(bias) for name, bias in biases.items()}}
    return nnx.merge(graph, [values[path] for path, _ in nnx.to_flat_state(state)])


def route(router: Router) -> tuple[list[int], np.ndarray]:
    _, experts, weights = router(dense_pass(jnp.zeros(1, jnp.int32)), jnp.asarray(SCORES))
    assert experts.dtype == jnp.int32 and weights.dtype == jnp.float32
    return np.asarray(experts)[0].tolist(), np.asarray(weights)[0]


@pytest.mark.parametrize("renormalise", [True, False])
def test_softmax_over_all_experts(renormalise: bool) -> None:
    experts, weights = route(filled(Router(Placement(), "gate", rule=RouteRule(2, renormalise=renormalise), **SIZES)))
    share = np.exp(SCORES[0]) / np.exp(SCORES[0]).sum()
    assert experts == [0, 2]  # equal scores: the lowest expert first
    np.testing.assert_allclose(weights, share[[0, 2]] / (share[[0, 2]].sum() if renormalise else 1), rtol=1e-6)


def test_softmax_over_the_chosen_ones_with_bias() -> None:
    bias = np.array([0.0, 3.0, -9.0, 0.0], np.float32)
    router = Router(Placement(), "router", rule=RouteRule(2, renormalise=True), bias=True, **SIZES)
    experts, weights = route(filled(router, bias=bias))
    assert experts == [1, 0]
    np.testing.assert_allclose(weights, np.exp([4.0, 2.0]) / np.exp([4.0, 2.0]).sum(), rtol=1e-6)


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_selection_bias_chooses_but_does_not_weigh(eps: float) -> None:
    rule = RouteRule(2, "sigmoid", renormalise=True, scaling=2.5, sum_eps=eps)
    router = Router(Placement("bfloat16"), "gate", rule=rule, selection_bias="bias", **SIZES)
    assert router.selection_bias is not None and router.selection_bias.declaration.dtype == "float32"
    experts, weights = route(filled(router, selection_bias=np.array([0.0, 0.0, 0.0, 5.0], np.float32)))
    sigmoid = 1 / (1 + np.exp(-SCORES[0]))
    assert experts == [3, 0]
    np.testing.assert_allclose(weights, 2.5 * sigmoid[[3, 0]] / (sigmoid[[3, 0]].sum() + eps), rtol=1e-5)


def drawn(module: nnx.Module, seed: int) -> nnx.Module:
    graph, state = nnx.split(module)
    leaves = [value for _, value in nnx.to_flat_state(state)]
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    values = [jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    return nnx.merge(graph, values)


@pytest.mark.parametrize("tokens", [1, 2, 3, ROUTE_ROWS + 1])
@pytest.mark.parametrize(
    ("rule", "biases"),
    [
        (RouteRule(3), {}),
        (RouteRule(3, renormalise=True), {"bias": True}),
        (RouteRule(3, "sigmoid", renormalise=True, scaling=2.5), {"selection_bias": "bias"}),
    ],
)
def test_kernels_route_as_plain_xla_does(rule: RouteRule, biases: dict[str, Any], tokens: int) -> None:
    """One kernel for few tokens, XLA for many; the last token of several is padding, and takes no expert."""
    placement = Placement("bfloat16")
    router = drawn(Router(placement, "gate", rule=rule, hidden=64, experts=12, **biases), 1)
    norm = drawn(RMSNorm(placement, "norm", 64, 1e-5), 2)
    live = max(1, tokens - 1)
    alone = dense_pass(jnp.zeros(tokens, jnp.int32))
    held = alone.tokens._replace(live=jnp.arange(tokens) < live)
    x = jax.random.normal(jax.random.key(3), (tokens, 64), jnp.bfloat16)
    results, programs = [], []
    for backend in (Backend.REFERENCE, Backend.INTERPRET):

        def route(x: jax.Array, backend: Backend = backend) -> tuple[jax.Array, jax.Array, jax.Array]:
            run = Pass(held, alone.cache, pick_ops(pick_kernels("cpu", backend=backend)))
            routed = router(run, x, norm)
            return routed.x.whole(), routed.experts, routed.weights

        programs.append(str(jax.make_jaxpr(route)(x)))
        results.append(jax.jit(route)(x))
    assert ["route_tokens" in program for program in programs] == [False, tokens <= ROUTE_ROWS]
    (normed, ids, weights), (kernel_normed, kernel_ids, kernel_weights) = (
        map(np.asarray, result) for result in results
    )
    np.testing.assert_allclose(normed.astype(np.float32), kernel_normed.astype(np.float32), rtol=0.02)
    np.testing.assert_array_equal(ids, kernel_ids)
    assert (ids[live:] == -1).all() and (ids[:live] >= 0).all()
    np.testing.assert_allclose(weights, kernel_weights, rtol=0.05, atol=0.01)


def test_more_experts_a_token_than_there_are_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="top_k=5: expected 1 to 4"):
        Router(Placement(), "gate", rule=RouteRule(5), hidden=4, experts=4)
