"""What a forward pass knows besides its weights: the tokens, the mesh, and how attention finds its keys.

Blocks are written once against `Context`. `DenseContext` is one whole sequence without a cache; `paged.PagedContext`
is a plan over the arena. T tokens, H query heads, K KV heads, D head size: all of one device.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from resin.models.grouped import grouped_experts
from resin.models.norm import RMSNorm
from resin.models.rope import Rope, rotate
from resin.pallas_kernels.fp8 import round_fp8
from resin.pallas_kernels.gates import Gate, GateFunction
from resin.pallas_kernels.mxfp4 import PackedMatrices
from resin.pallas_kernels.route import NormedRows

if TYPE_CHECKING:
    from resin.models.routers import Router


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Where one attention layer keeps its keys and values, and how it attends.

    Attributes:
        group: cache group.
        index: place of the layer within the group's planes.
        kv_heads: KV heads of one device.
        head_dim: values a head.
        scale: factor on the scores.
        window: keys that a query sees, itself included; None for all.
        softcap: `softcap * tanh(score / softcap)`; None for no cap.
        plane: the group's plane with rows `(index * 2 + (0 keys, 1 values)) * kv_heads + head`.
    """

    group: str
    index: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    plane: str = "kv"


@dataclass(frozen=True, slots=True)
class ShiftLayer:
    """Where one layer keeps the inputs that a short causal filter still needs.

    Attributes:
        group: State group.
        index: place of the layer within the group's plane.
        taps: inputs before the current one that the filter sees.
        plane: the group's plane with rows `index * taps + age`, the oldest first, as wide as the input.
    """

    group: str
    index: int
    taps: int
    plane: str = "conv"


class Routed(NamedTuple):
    """Tokens on their way to the experts.

    Attributes:
        x: [T, hidden], normalised.
        experts: int32 [T, k], as `Context.pad_experts` leaves them, numbered over all devices.
        weights: float32 [T, k].
    """

    x: NormedRows
    experts: jax.Array
    weights: jax.Array


class ExpertOperands(NamedTuple):
    """Experts as kernels take them.

    Attributes:
        gate_up, down: `[E, hidden, 2 I]` and `[E, I, hidden]`, or both packed.
        gate: joins the halves of the first product.
        biases: `[E, 2 I]` and `[E, hidden]`, or None.
    """

    gate_up: jax.Array | PackedMatrices
    down: jax.Array | PackedMatrices
    gate: Gate
    biases: tuple[jax.Array, jax.Array] | None


class Context(abc.ABC):
    """One forward pass at trace time.

    Attributes:
        token_ids: int32 [T].
        positions: int32 [T].
        tp: devices on the mesh axis "tp"; the pass runs inside a shard_map over it when above 1.
    """

    def __init__(self, token_ids: jax.Array, positions: jax.Array, tp: int = 1) -> None:
        self.token_ids = token_ids
        self.positions = positions
        self.tp = tp
        self._rotations: dict[Rope, tuple[jax.Array, jax.Array]] = {}

    def rotation(self, rope: Rope) -> tuple[jax.Array, jax.Array]:
        """cos and sin `[T, D/2]` of this pass, made once for all layers."""
        if rope not in self._rotations:
            # Without the barrier XLA fuses the sines into every layer's rotation and computes them again for each head.
            self._rotations[rope] = lax.optimization_barrier(rope.rotation(self.positions))
        return self._rotations[rope]

    def sum_tp(self, partial: jax.Array) -> jax.Array:
        """Adds the devices' shares of a product whose inner dimension is cut."""
        return lax.psum(partial, "tp") if self.tp > 1 else partial

    def gather_tp(self, share: jax.Array) -> jax.Array:
        """Joins the devices' shares of the last axis."""
        return lax.all_gather(share, "tp", axis=share.ndim - 1, tiled=True) if self.tp > 1 else share

    @abc.abstractmethod
    def attend(
        self,
        layer: AttentionLayer,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Remembers the keys and values of these tokens, then attends causally.

        Args:
            layer: which layer this is.
            query: [T, H, D], rotated.
            key, value: [T, K, D], the key rotated.
            sinks: [H] logits that only add to the denominator.

        Returns:
            [T, H, D].
        """

    def attend_product(
        self,
        layer: AttentionLayer,
        x: jax.Array,
        weight: jax.Array,
        bias: jax.Array | None,
        rope: Rope,
        *,
        norm: RMSNorm | None,
        norms: tuple[RMSNorm, RMSNorm] | None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """The QKV product, then `attend_joined`.

        Args:
            layer: which layer this is.
            x: [T, hidden].
            weight: [hidden, (H + 2 K) * D], query heads, key heads, value heads.
            bias: [(H + 2 K) * D] added to the product; None for none.
            rope, norms, sinks: as for `attend_joined`.
            norm: of x before the product.

        Returns:
            [T, H, D].
        """
        joined = self.product(x, weight, norm=norm)
        if bias is not None:
            joined = joined + bias[None, :]
        return self.attend_joined(layer, joined.reshape(x.shape[0], -1, layer.head_dim), rope, norms, sinks)

    def attend_joined(
        self,
        layer: AttentionLayer,
        joined: jax.Array,
        rope: Rope,
        norms: tuple[RMSNorm, RMSNorm] | None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Normalises and rotates queries and keys, then `attend`.

        Args:
            layer: which layer this is.
            joined: [T, H + 2 K, D], query heads, key heads, value heads.
            rope: rotation of queries and keys.
            norms: per-head norms of queries and keys; None for none.
            sinks: as for `attend`.

        Returns:
            [T, H, D].
        """
        heads = joined.shape[1] - 2 * layer.kv_heads
        query, key, value = jnp.split(joined, (heads, heads + layer.kv_heads), axis=1)
        if norms is not None:
            query, key = norms[0](query), norms[1](key)
        rotation = self.rotation(rope)
        return self.attend(layer, rotate(query, rotation), rotate(key, rotation), value, sinks)

    def product(
        self,
        x: jax.Array,
        weight: jax.Array,
        *,
        norm: RMSNorm | None = None,
        bias: jax.Array | None = None,
        gate: GateFunction | None = None,
        residual: jax.Array | None = None,
        is_partial: bool = False,
        out_dtype: str | None = None,
    ) -> jax.Array:
        """`residual + gated(norm(x) @ weight + bias)`, in as few kernels as the platform allows.

        Args:
            x: [T, K].
            weight: [K, N].
            norm: of x before the product.
            bias: [N] added to the product; None for none.
            gate: joins the first half of the columns with the second.
            residual: [T, N] (gated: N / 2), added at the end.
            is_partial: K is cut over the mesh axis "tp", so that the devices' products add up.
            out_dtype: of the result; None for x's.
        """
        out = jnp.matmul(x if norm is None else norm(x), weight, preferred_element_type=out_dtype)
        if is_partial:
            out = self.sum_tp(out)
        if bias is not None:
            out = out + bias[None, :]
        if gate is not None:
            out = gate(*jnp.split(out, 2, axis=-1))
        return out if residual is None else residual + out

    def route(self, router: Router, x: jax.Array, norm: RMSNorm | None) -> Routed:
        """The experts of `norm(x)`, in as few kernels as the platform allows.

        Args:
            router: scores and chooses.
            x: [T, hidden].
            norm: of x before the scores and the experts; None for none.
        """
        x = x if norm is None else norm(x)
        experts, weights = router(x)
        return Routed(NormedRows(x), self.pad_experts(experts), weights)

    def pad_experts(self, experts: jax.Array) -> jax.Array:
        """int32 [T, k]: padding takes the first token's experts, so that it reads none that nobody else does."""
        return jnp.where(self.live_tokens()[:, None], experts, experts[:1])

    def mix_experts(
        self,
        routed: Routed,
        count: int,
        apply: Callable[[jax.Array, jax.Array], jax.Array],
        operands: ExpertOperands | None = None,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        """`residual` plus the weighted sum of each token's experts; padding costs nothing.

        Args:
            routed: tokens and their experts.
            count: experts of this device.
            apply: maps an expert (int32 scalar) and rows [M, hidden] to [M, hidden].
            operands: the same function as kernels know it, if they do.
            residual: [T, hidden] added at the end.
        """
        experts = routed.experts
        if self.tp > 1:
            experts = experts - lax.axis_index("tp") * count
        experts = jnp.where(self.live_tokens()[:, None], experts, -1)
        out = self.sum_tp(grouped_experts(routed.x.whole(), experts, routed.weights, count, apply))
        return out if residual is None else residual + out

    @abc.abstractmethod
    def recall(self, layer: ShiftLayer, x: jax.Array) -> list[jax.Array]:
        """Remembers these tokens' inputs, and gives what came before each.

        Args:
            layer: which layer this is.
            x: [T, W].

        Returns:
            `taps` arrays [T, W], the input `taps` tokens ago first; zeros before the sequence's start.
        """

    @abc.abstractmethod
    def live_tokens(self) -> jax.Array:
        """bool [T], False for the padding at the end of a plan."""


class DenseContext(Context):
    """One whole sequence, nothing remembered: for training, goldens and tests.

    Args:
        token_ids: int32 [T].
        tp: devices on the mesh axis "tp".
        fp8_scales: by cache group; its keys and values are rounded as a cache of 8-bit floats would round them.
    """

    def __init__(self, token_ids: jax.Array, tp: int = 1, fp8_scales: Mapping[str, float] | None = None) -> None:
        super().__init__(token_ids, jnp.arange(token_ids.shape[0], dtype=jnp.int32), tp)
        self._fp8_scales = fp8_scales or {}

    def attend(
        self,
        layer: AttentionLayer,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        tokens, heads, width = query.shape
        if (scale := self._fp8_scales.get(layer.group)) is not None:
            key, value = ((round_fp8(x, scale).astype(jnp.float32) * scale).astype(x.dtype) for x in (key, value))
        grouped = query.reshape(tokens, layer.kv_heads, heads // layer.kv_heads, width)
        scores = jnp.einsum("tkgd,skd->kgts", grouped, key, preferred_element_type=jnp.float32) * layer.scale
        if layer.softcap is not None:
            scores = layer.softcap * jnp.tanh(scores / layer.softcap)
        distance = self.positions[:, None] - self.positions[None, :]
        seen = distance >= 0
        if layer.window is not None:
            seen &= distance < layer.window
        scores = jnp.where(seen, scores, -jnp.inf)
        top = scores.max(axis=-1, keepdims=True)
        if sinks is not None:
            bias = sinks.astype(jnp.float32).reshape(layer.kv_heads, -1, 1, 1)
            top = jnp.maximum(top, bias)
        weights = jnp.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total = total + jnp.exp(bias - top)
        weights = (weights / total).astype(value.dtype)
        return jnp.einsum("kgts,skd->tkgd", weights, value).reshape(tokens, heads, width)

    def recall(self, layer: ShiftLayer, x: jax.Array) -> list[jax.Array]:
        padded = jnp.pad(x, ((layer.taps, 0), (0, 0)))
        return [padded[age : age + x.shape[0]] for age in range(layer.taps)]

    def live_tokens(self) -> jax.Array:
        return jnp.ones(self.token_ids.shape, jnp.bool_)
