"""Gates of feed-forward layers: what becomes of a gate's and an up value before the product down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

Kind = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Gate:
    """`act(gate) * (up + up_bias)`, with gate at most `limit` and up within it on both sides.

    Attributes:
        kind: `silu` is `gate * sigmoid(alpha * gate)`, `gelu_tanh` the tanh approximation of GELU.
        alpha: slope within the sigmoid of `silu`.
        limit: where the values are cut; None for nowhere.
        up_bias: added to up.
    """

    kind: Kind = "silu"
    alpha: float = 1.0
    limit: float | None = None
    up_bias: float = 0.0

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Both of one shape, computed in float32; the same shape and dtype."""
        dtype = gate.dtype
        gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
        if self.limit is not None:
            gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (activate(self.kind, gate, self.alpha) * (up + self.up_bias if self.up_bias else up)).astype(dtype)


SILU = Gate()

GateFunction = Gate | Callable[[jax.Array, jax.Array], jax.Array]
"""Maps gate and up, of one shape, to the values that go down. Kernels compute a `Gate`, and plain XLA anything."""


def activate(kind: Kind, x: jax.Array, alpha: float = 1.0) -> jax.Array:
    """The activation of a gate."""
    if kind == "silu":
        return x / (1.0 + jnp.exp(-alpha * x))
    return 0.5 * x * (1.0 + jnp.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
