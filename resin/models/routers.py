"""Routers of mixtures of experts: which experts a token takes, and how much of each. T tokens, E experts, k taken."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from resin.models.context import Context, Routed
from resin.models.declare import BIAS, Placement, Transposed, declare
from resin.models.norm import RMSNorm
from resin.pallas_kernels.route import RouteRule, route_tokens_ref


class Router(nnx.Module):
    """Scores every expert for every token, in float32, and chooses by a rule.

    Args:
        placement: dtype and mesh.
        name: checkpoint prefix of the scoring product.
        rule: how it chooses and weighs; a router of another kind overrides `route`.
        hidden: width of the residual stream.
        experts: E.
        bias: add a bias to the scores.
        selection_bias: checkpoint name of the bias that counts for the choice alone; None for none.

    Raises:
        InvalidRequest: the rule cannot be followed.
    """

    def __init__(
        self,
        placement: Placement,
        name: str,
        *,
        rule: RouteRule,
        hidden: int,
        experts: int,
        bias: bool = False,
        selection_bias: str | None = None,
    ) -> None:
        rule.check(experts, has_selection_bias=selection_bias is not None)
        self.rule = rule
        self.gate = declare((hidden, experts), placement, f"{name}.weight", assembly=Transposed())
        self.bias = declare((experts,), placement, f"{name}.bias", init=BIAS) if bias else None
        self.selection_bias = (
            declare((experts,), placement, selection_bias, dtype="float32", init=BIAS)
            if selection_bias is not None
            else None
        )

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Experts int32 [T, k] and their weights float32 [T, k]; equal shares take the lowest expert."""
        experts, weights, *_ = route_tokens_ref(x, self.gate[...], rule=self.rule, **self.biases())
        return experts, weights

    def biases(self) -> dict[str, Any]:
        """Those that there are, by the names that `route_tokens` has for them."""
        named = {"bias": self.bias, "selection_bias": self.selection_bias}
        return {name: bias[...] for name, bias in named.items() if bias is not None}

    def route(self, context: Context, x: jax.Array, norm: RMSNorm | None) -> Routed:
        """The same of `norm(x)` within a pass, which knows the platform's kernels and the padding."""
        return context.route(self, x, norm)
