"""Gated feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable

import jax
from flax import nnx

from resin.models.context import Context
from resin.models.declare import Fused, FusedPart, Placement, Transposed, declare
from resin.models.norm import RMSNorm


class GatedMLP(nnx.Module):
    """`down(activation(gate x) * up x)`, gate and up in one product.

    Args:
        placement: dtype and mesh.
        name: checkpoint prefix, for example "model.layers.0.mlp".
        hidden: width of the residual stream.
        width: width inside.
        activation: on the gate.
        names: checkpoint names of gate, up and down.
    """

    def __init__(
        self,
        placement: Placement,
        name: str,
        *,
        hidden: int,
        width: int,
        activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        share = placement.split("intermediate_size", width)
        gate, up, down = (f"{name}.{part}.weight" for part in names)
        half = FusedPart(placement.tp, share)
        self.gate_up = declare(
            (hidden, 2 * width),
            placement,
            (gate, up),
            assembly=Fused((half, half), placement.tp),
            partition=(None, "tp"),
        )
        self.down = declare((width, hidden), placement, down, assembly=Transposed(), partition=("tp", None))
        self.activation = activation

    def __call__(
        self, context: Context, x: jax.Array, *, norm: RMSNorm | None = None, residual: jax.Array | None = None
    ) -> jax.Array:
        """`residual + mlp(norm(x))`, `[T, hidden]` -> `[T, hidden]`."""
        with jax.named_scope("mlp"):
            inner = context.product(x, self.gate_up[...], norm=norm, gate=self.activation)
            return context.product(inner, self.down[...], residual=residual, is_partial=True)
