"""Routers of mixtures of experts: which experts a token takes, and how much of each. T tokens, E experts, k taken."""

from __future__ import annotations

import jax
from flax import nnx

from resin.models.assemblies import Transposed
from resin.models.declare import BIAS, Placement, declare
from resin.models.forward import Pass
from resin.models.norm import RMSNorm
from resin.models.ops.protocol import Routed
from resin.pallas_kernels.route import RouteRule


class Router(nnx.Module):
    """Scores every expert for every token, in float32, and chooses by a rule.

    Args:
        placement: dtype and mesh.
        name: checkpoint prefix of the scoring product.
        rule: how it chooses and weighs; a router of another kind overrides `__call__`.
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

    def __call__(self, run: Pass, x: jax.Array, norm: RMSNorm | None = None) -> Routed:
        """The experts of `norm(x)` [T, hidden], numbered over all devices; padding takes none."""
        return run.ops.route(
            x,
            self.gate[...],
            self.rule,
            live=run.tokens.live,
            norm=norm,
            bias=None if self.bias is None else self.bias[...],
            selection_bias=None if self.selection_bias is None else self.selection_bias[...],
        )
