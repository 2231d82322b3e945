"""What a layer asks of a device. T tokens, H query heads, K KV heads, D head size, E experts: all of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax

from resin.models.cache.protocol import AppendTarget, Heads
from resin.models.norm import RMSNorm
from resin.pallas_kernels.gates import GateFunction
from resin.pallas_kernels.mxfp4 import PackedMatrices
from resin.pallas_kernels.route import NormedRows, RouteRule

Rotation = tuple[jax.Array, jax.Array]
"""cos and sin, float32 [T, D/2]."""


HeadNorm = RMSNorm | Callable[[jax.Array], jax.Array]
"""Maps heads `[T, heads, D]` to their norms. Kernels compute an `RMSNorm` of each head, and plain XLA anything."""


class HeadOperands(NamedTuple):
    """What makes heads of tokens.

    Attributes:
        weight: [hidden, (H + 2 K) * D], each KV head with its queries, its key and its value.
        bias: [(H + 2 K) * D] added to the product; None for none.
        norms: of the query and of the key heads; None for none.
        kv_heads: K.
        width: D.
    """

    weight: jax.Array
    bias: jax.Array | None
    norms: tuple[HeadNorm, HeadNorm] | None
    kv_heads: int
    width: int


class Routed(NamedTuple):
    """Tokens on their way to the experts.

    Attributes:
        x: [T, hidden], normalised.
        experts: int32 [T, k]; an id outside [0, E) takes no expert and costs nothing.
        weights: float32 [T, k].
    """

    x: NormedRows
    experts: jax.Array
    weights: jax.Array


class ExpertOperands(NamedTuple):
    """E gated feed-forward layers.

    Attributes:
        gate_up, down: `[E, hidden, 2 I]`, gates then ups, and `[E, I, hidden]`; or both packed, gate and up in turns of
            eight.
        gate: joins the halves of the first product.
        biases: `[E, 2 I]` and `[E, hidden]`, or None.
    """

    gate_up: jax.Array | PackedMatrices
    down: jax.Array | PackedMatrices
    gate: GateFunction
    biases: tuple[jax.Array, jax.Array] | None

    @property
    def num_experts(self) -> int:
        """E."""
        down = self.down.units if isinstance(self.down, PackedMatrices) else self.down
        return int(down.shape[0])


class Ops(Protocol):
    """Products with weights, and what surrounds them, in as few kernels as the device allows."""

    def linear(
        self,
        x: jax.Array,
        weight: jax.Array,
        *,
        norm: RMSNorm | None = None,
        bias: jax.Array | None = None,
        gate: GateFunction | None = None,
        residual: jax.Array | None = None,
        out_dtype: str | None = None,
    ) -> jax.Array:
        """`residual + gated(norm(x) @ weight + bias)`.

        Args:
            x: [T, in].
            weight: [in, out].
            norm: of x before the product.
            bias: [out] added to the product; None for none.
            gate: joins the first half of the columns with the second.
            residual: [T, out] (gated: out / 2), added at the end.
            out_dtype: of the result; None for x's.
        """
        ...

    def project_heads(
        self,
        x: jax.Array,
        qkv: HeadOperands,
        rotation: Rotation,
        *,
        norm: RMSNorm | None = None,
        target: AppendTarget | None = None,
    ) -> Heads:
        """The QKV product; queries and keys normalised per head, then rotated.

        Args:
            x: [T, hidden].
            qkv: weights.
            rotation: of queries and keys.
            norm: of x before the product.
            target: where a kernel may append keys and values itself.
        """
        ...

    def route(
        self,
        x: jax.Array,
        gate: jax.Array,
        rule: RouteRule,
        *,
        live: jax.Array,
        norm: RMSNorm | None = None,
        bias: jax.Array | None = None,
        selection_bias: jax.Array | None = None,
    ) -> Routed:
        """Scores every expert for every token, in float32, and chooses by the rule; equal shares take the lowest.

        Args:
            x: [T, hidden].
            gate: [hidden, E], E over all devices.
            rule: how to choose and weigh.
            live: bool [T]; other tokens take no expert.
            norm: of x before the scores and the experts.
            bias: [E] added to the scores.
            selection_bias: [E] that counts for the choice alone.
        """
        ...

    def experts(self, routed: Routed, experts: ExpertOperands, residual: jax.Array | None = None) -> jax.Array:
        """`residual` plus the weighted sum of each token's experts, `[T, hidden]`.

        Args:
            routed: tokens, and their experts by their index in `experts`.
            experts: of this device.
            residual: added at the end.
        """
        ...
