"""Routers of mixtures of experts: which experts a token takes, and how much of each. T tokens, E experts, k taken."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from resin.models.declare import BIAS, Placement, Transposed, declare


class Router(nnx.Module):
    """Scores every expert for every token, in float32.

    Args:
        placement: dtype and mesh.
        name: checkpoint prefix of the scoring product.
        hidden: width of the residual stream.
        experts: E.
        top_k: k.
        bias: add a bias to the scores.
    """

    def __init__(
        self, placement: Placement, name: str, *, hidden: int, experts: int, top_k: int, bias: bool = False
    ) -> None:
        self.gate = declare((hidden, experts), placement, f"{name}.weight", assembly=Transposed())
        self.bias = declare((experts,), placement, f"{name}.bias", init=BIAS) if bias else None
        self.top_k = top_k

    def scores(self, x: jax.Array) -> jax.Array:
        """float32 [T, E]."""
        scores = jnp.matmul(x, self.gate[...], preferred_element_type=jnp.float32)
        return scores if self.bias is None else scores + self.bias[...].astype(jnp.float32)[None, :]

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Experts int32 [T, k] and their weights float32 [T, k]; equal scores take the lowest expert."""
        raise NotImplementedError


class SoftmaxRouter(Router):
    """Softmax over all experts, then the k largest; their weights sum to 1 if `renormalise`."""

    def __init__(self, placement: Placement, name: str, *, renormalise: bool, **sizes: Any) -> None:
        super().__init__(placement, name, **sizes)
        self.renormalise = renormalise

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        weights, experts = lax.top_k(jax.nn.softmax(self.scores(x), axis=-1), self.top_k)
        return experts, weights / weights.sum(axis=-1, keepdims=True) if self.renormalise else weights


class TopKSoftmaxRouter(Router):
    """The k largest scores, then softmax over these alone."""

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores, experts = lax.top_k(self.scores(x), self.top_k)
        return experts, jax.nn.softmax(scores, axis=-1)


class SigmoidRouter(Router):
    """Chooses by sigmoid plus a learned bias, and weighs by the sigmoid alone.

    Args:
        selection_bias: checkpoint name of the bias, or None for none.
        renormalise: divide the weights by their sum (plus 1e-6).
        scaling: factor on the weights.
    """

    def __init__(
        self,
        placement: Placement,
        name: str,
        *,
        selection_bias: str | None,
        renormalise: bool,
        scaling: float,
        **sizes: Any,
    ) -> None:
        super().__init__(placement, name, **sizes)
        self.selection_bias = (
            declare((sizes["experts"],), placement, selection_bias, dtype="float32", init=BIAS)
            if selection_bias is not None
            else None
        )
        self.renormalise = renormalise
        self.scaling = scaling

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = jax.nn.sigmoid(self.scores(x))
        biased = scores if self.selection_bias is None else scores + self.selection_bias[...][None, :]
        _, experts = lax.top_k(biased, self.top_k)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if self.renormalise:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-6)
        return experts, weights * self.scaling
