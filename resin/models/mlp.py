"""Gated feed-forward layer."""

from __future__ import annotations

import jax
from flax import nnx

from resin.models.assemblies import Joined, Sections, Transposed
from resin.models.axes import Axis
from resin.models.declare import Placement
from resin.models.forward import Pass
from resin.models.linear import Linear
from resin.models.norm import RMSNorm
from resin.pallas_kernels.gates import SILU, GateFunction

FUSED = ("gate_up_proj", "down_proj")
"""Names where gate and up are one tensor."""


class GatedMLP(nnx.Module):
    """`down(gate(gate x, up x))`, gate and up in one product.

    Args:
        placement: dtype and mesh.
        name: checkpoint prefix, for example "model.layers.0.mlp".
        hidden: width of the residual stream.
        width: width inside.
        gate: joins gate and up.
        names: checkpoint names of gate, up and down, or of one that is gate and up, and of down.
    """

    def __init__(
        self,
        placement: Placement,
        name: str,
        *,
        hidden: int,
        width: int,
        gate: GateFunction = SILU,
        names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        placement.split("intermediate_size", width, Axis.FFN)
        *inputs, down_name = (f"{name}.{part}.weight" for part in names)
        self.gate_up = Linear(
            placement,
            inputs,
            (hidden, 2, width),
            assembly=Joined(2) if len(inputs) == 2 else Sections(Joined(2), (width, width)),
            axes=(None, None, Axis.FFN),
        )
        self.down = Linear(placement, down_name, (width, hidden), assembly=Transposed(), axes=(Axis.FFN, None))
        self.gate = gate

    def __call__(
        self, run: Pass, x: jax.Array, *, norm: RMSNorm | None = None, residual: jax.Array | None = None
    ) -> jax.Array:
        """`residual + mlp(norm(x))`, `[T, hidden]` -> `[T, hidden]`."""
        with jax.named_scope("mlp"):
            inner = run.ops.linear(x, self.gate_up.operand(), norm=norm, gate=self.gate)
            return run.row_parallel(Axis.FFN, inner, self.down.operand(), residual=residual)
