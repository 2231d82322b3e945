"""Root-mean-square normalisation."""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
from flax import nnx

from resin.models.declare import Init, Placement, declare


class NormOrder(enum.Enum):
    """Where the weight meets the cast back from float32; families differ, and bfloat16 shows it."""

    CAST_THEN_SCALE = "cast"
    """Llama, Qwen3, LFM2, GLM."""
    SCALE_THEN_CAST = "scale"
    """gpt-oss, DeepSeek-V4."""
    ONE_PLUS = "one_plus"
    """Gemma 3: (1 + weight) in float32, then the cast."""


class RMSNorm(nnx.Module):
    """`x * rsqrt(mean(x^2) + eps) * weight` over the last axis, the mean in float32."""

    def __init__(
        self,
        placement: Placement,
        name: str,
        width: int,
        eps: float,
        order: NormOrder = NormOrder.CAST_THEN_SCALE,
    ) -> None:
        init = Init(std=0.0) if order is NormOrder.ONE_PLUS else None
        self.weight = declare((width,), placement, f"{name}.weight", init=init)
        self.eps = eps
        self.order = order

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        weight = self.weight[...].reshape((1,) * (x.ndim - 1) + (-1,))
        if self.order is NormOrder.CAST_THEN_SCALE:
            return wide.astype(x.dtype) * weight
        scale = weight.astype(jnp.float32) + (1.0 if self.order is NormOrder.ONE_PLUS else 0.0)
        return (wide * scale).astype(x.dtype)
