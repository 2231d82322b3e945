from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from resin.models.declare import Placement
from resin.models.routers import Router, SigmoidRouter, SoftmaxRouter, TopKSoftmaxRouter

SIZES = {"hidden": 4, "experts": 4, "top_k": 2}
SCORES = np.array([[2.0, 1.0, 2.0, -1.0]], np.float32)


def filled(router: Router, **biases: np.ndarray) -> Router:
    """The router with an identity product, so that its scores are its input."""
    graph, state = nnx.split(router)
    values = {("gate",): jnp.eye(4), **{(name,): jnp.asarray(bias) for name, bias in biases.items()}}
    return nnx.merge(graph, [values[path] for path, _ in nnx.to_flat_state(state)])


def route(router: Router) -> tuple[list[int], np.ndarray]:
    experts, weights = router(jnp.asarray(SCORES))
    assert experts.dtype == jnp.int32 and weights.dtype == jnp.float32
    return np.asarray(experts)[0].tolist(), np.asarray(weights)[0]


@pytest.mark.parametrize("renormalise", [True, False])
def test_softmax_over_all_experts(renormalise: bool) -> None:
    experts, weights = route(filled(SoftmaxRouter(Placement(), "gate", renormalise=renormalise, **SIZES)))
    share = np.exp(SCORES[0]) / np.exp(SCORES[0]).sum()
    assert experts == [0, 2]  # equal scores: the lowest expert first
    np.testing.assert_allclose(weights, share[[0, 2]] / (share[[0, 2]].sum() if renormalise else 1), rtol=1e-6)


def test_softmax_over_the_chosen_ones_with_bias() -> None:
    bias = np.array([0.0, 3.0, -9.0, 0.0], np.float32)
    experts, weights = route(filled(TopKSoftmaxRouter(Placement(), "router", bias=True, **SIZES), bias=bias))
    assert experts == [1, 0]
    np.testing.assert_allclose(weights, np.exp([4.0, 2.0]) / np.exp([4.0, 2.0]).sum(), rtol=1e-6)


def test_selection_bias_chooses_but_does_not_weigh() -> None:
    router = SigmoidRouter(Placement("bfloat16"), "gate", selection_bias="bias", renormalise=True, scaling=2.5, **SIZES)
    assert router.selection_bias is not None and router.selection_bias.declaration.dtype == "float32"
    experts, weights = route(filled(router, selection_bias=np.array([0.0, 0.0, 0.0, 5.0], np.float32)))
    sigmoid = 1 / (1 + np.exp(-SCORES[0]))
    assert experts == [3, 0]
    np.testing.assert_allclose(weights, 2.5 * sigmoid[[3, 0]] / (sigmoid[[3, 0]].sum() + 1e-6), rtol=1e-5)
