"""Gated short convolution: a causal filter over the last few tokens, one filter a channel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from resin.models.assemblies import Channels, Joined, Sections, Transposed
from resin.models.axes import Axis
from resin.models.cache.protocol import PlaneRef
from resin.models.declare import Init, Placement, declare
from resin.models.forward import Pass
from resin.models.linear import Linear
from resin.models.norm import RMSNorm


class ShortConv(nnx.Module):
    """`output(C * filter(B * x))`, with B, C and x from one input product.

    Args:
        placement: dtype and mesh.
        name: checkpoint prefix, for example "model.layers.0.conv".
        hidden: channels.
        state: where the cache keeps the earlier values of `B * x` that the filter sees, a row each.
    """

    def __init__(self, placement: Placement, name: str, *, hidden: int, state: PlaneRef) -> None:
        placement.split("hidden_size", hidden, Axis.CHANNELS)
        taps = state.rows + 1
        self.state = state
        self.input = Linear(
            placement,
            f"{name}.in_proj.weight",
            (hidden, 3, hidden),
            assembly=Sections(Joined(3), (hidden,) * 3),
            axes=(None, None, Axis.CHANNELS),
        )
        self.filter = declare(
            (taps, hidden),
            placement,
            f"{name}.conv.weight",
            assembly=Channels(),
            axes=(None, Axis.CHANNELS),
            init=Init(std=taps**-0.5),
        )
        self.output = Linear(
            placement, f"{name}.out_proj.weight", (hidden, hidden), assembly=Transposed(), axes=(Axis.CHANNELS, None)
        )

    def __call__(
        self, run: Pass, x: jax.Array, *, norm: RMSNorm | None = None, residual: jax.Array | None = None
    ) -> jax.Array:
        """`residual + conv(norm(x))`, `[T, hidden]` -> `[T, hidden]`."""
        with jax.named_scope("short_conv"):
            gate_in, gate_out, x = jnp.split(run.ops.linear(x, self.input.operand(), norm=norm), 3, axis=-1)
            gated = gate_in * x
            inputs = [*run.cache.shift_state(self.state, gated), gated]
            filtered = sum(tap[None, :] * value for tap, value in zip(self.filter[...], inputs, strict=True))
            return run.row_parallel(Axis.CHANNELS, gate_out * filtered, self.output.operand(), residual=residual)
