"""Gated short convolution: a causal filter over the last few tokens, one filter a channel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from resin.models.context import Context, ShiftLayer
from resin.models.declare import Channels, Fused, FusedPart, Init, Placement, Sections, Transposed, declare
from resin.models.norm import RMSNorm


class ShortConv(nnx.Module):
    """`output(C * filter(B * x))`, with B, C and x from one input product.

    Args:
        placement: dtype and mesh.
        name: checkpoint prefix, for example "model.layers.0.conv".
        hidden: channels.
        layer: this layer's place in the cache; the filter sees `layer.taps` earlier values of `B * x`.
    """

    def __init__(self, placement: Placement, name: str, *, hidden: int, layer: ShiftLayer) -> None:
        third = FusedPart(placement.tp, placement.split("hidden_size", hidden))
        taps = layer.taps + 1
        self.layer = layer
        self.input = declare(
            (hidden, 3 * hidden),
            placement,
            f"{name}.in_proj.weight",
            assembly=Sections(Fused((third,) * 3, placement.tp)),
            partition=(None, "tp"),
        )
        self.filter = declare(
            (taps, hidden),
            placement,
            f"{name}.conv.weight",
            assembly=Channels(),
            partition=(None, "tp"),
            init=Init(std=taps**-0.5),
        )
        self.output = declare(
            (hidden, hidden), placement, f"{name}.out_proj.weight", assembly=Transposed(), partition=("tp", None)
        )

    def __call__(
        self, context: Context, x: jax.Array, *, norm: RMSNorm | None = None, residual: jax.Array | None = None
    ) -> jax.Array:
        """`residual + conv(norm(x))`, `[T, hidden]` -> `[T, hidden]`."""
        with jax.named_scope("short_conv"):
            gate_in, gate_out, x = jnp.split(context.product(x, self.input[...], norm=norm), 3, axis=-1)
            gated = gate_in * x
            inputs = [*context.recall(self.layer, gated), gated]
            filtered = sum(tap[None, :] * value for tap, value in zip(self.filter[...], inputs, strict=True))
            return context.product(gate_out * filtered, self.output[...], residual=residual, is_partial=True)
