"""Grouped-query attention with rotary positions: one fused input product, one output product."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from resin.models.context import AttentionLayer, Context
from resin.models.declare import Fused, FusedPart, Placement, Transposed, declare
from resin.models.norm import RMSNorm
from resin.models.rope import Rope, rotate


class Attention(nnx.Module):
    """q, k, v (normalised per head if asked), rotation, attention over the context, output product.

    Args:
        placement: dtype and mesh.
        name: checkpoint prefix, for example "model.layers.0.self_attn".
        hidden: width of the residual stream.
        heads: query heads over all devices.
        kv_heads: KV heads of the model; copied when tp exceeds them.
        layer: this layer's place in the cache and its score options, `kv_heads` being one device's.
        rope: rotation of queries and keys.
        qk_norm_eps: normalise each query and key head before the rotation; None for no norms.
    """

    def __init__(
        self,
        placement: Placement,
        name: str,
        *,
        hidden: int,
        heads: int,
        kv_heads: int,
        layer: AttentionLayer,
        rope: Rope,
        qk_norm_eps: float | None = None,
    ) -> None:
        width = layer.head_dim
        self.heads = placement.split("num_attention_heads", heads)
        self.layer = layer
        self.rope = rope
        fused = Fused((FusedPart(heads, width), FusedPart(kv_heads, width), FusedPart(kv_heads, width)), placement.tp)
        self.qkv = declare(
            (hidden, fused.columns()),
            placement,
            [f"{name}.{part}_proj.weight" for part in "qkv"],
            assembly=fused,
            partition=(None, "tp"),
        )
        self.output = declare(
            (heads * width, hidden),
            placement,
            f"{name}.o_proj.weight",
            assembly=Transposed(),
            partition=("tp", None),
        )
        self.q_norm = RMSNorm(placement, f"{name}.q_norm", width, qk_norm_eps) if qk_norm_eps is not None else None
        self.k_norm = RMSNorm(placement, f"{name}.k_norm", width, qk_norm_eps) if qk_norm_eps is not None else None

    def __call__(self, context: Context, x: jax.Array) -> jax.Array:
        """`[T, hidden]` -> `[T, hidden]`."""
        tokens, kv_heads, width = x.shape[0], self.layer.kv_heads, self.layer.head_dim
        with jax.named_scope("attention"):
            joined = (x @ self.qkv[...]).reshape(tokens, self.heads + 2 * kv_heads, width)
            query, key, value = jnp.split(joined, (self.heads, self.heads + kv_heads), axis=1)
            if self.q_norm is not None and self.k_norm is not None:
                query, key = self.q_norm(query), self.k_norm(key)
            rotation = context.rotation(self.rope)
            query, key = rotate(query, rotation), rotate(key, rotation)
            out = context.attend(self.layer, query, key, value)
            return context.sum_tp(out.reshape(tokens, self.heads * width) @ self.output[...])
