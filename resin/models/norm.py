"""Normalisation: RMSNorm, LayerNorm without a bias, and those of heads."""

from __future__ import annotations

import enum
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from resin.models.assemblies import OnePlus, Reordered
from resin.models.axes import Axes, Axis
from resin.models.declare import Init, Placement, declare
from resin.pallas_kernels.norms import normalise, weigh


class NormOrder(enum.Enum):
    """Where the weight meets the cast back from float32; families differ, and bfloat16 shows it."""

    CAST_THEN_SCALE = "cast"
    """Llama, Qwen3, LFM2, GLM."""
    SCALE_THEN_CAST = "scale"
    """Gemma, gpt-oss, DeepSeek-V4."""


class RMSNorm(nnx.Module):
    """`x * rsqrt(mean(x^2) + eps) * weight` over the last axis, the mean in float32.

    Args:
        placement: dtype and mesh.
        name: checkpoint prefix.
        width: of the last axis.
        eps: added to the mean square.
        order: where the weight meets the cast.
        one_plus: the checkpoint stores the weight less one, as Gemma's do; the sum is kept in float32.
        lanes: order of the checkpoint's numbers in the model's weight, as `Rope.lanes`; None for their own.
    """

    def __init__(
        self,
        placement: Placement,
        name: str,
        width: int,
        eps: float,
        order: NormOrder = NormOrder.CAST_THEN_SCALE,
        one_plus: bool = False,
        lanes: tuple[int, ...] | None = None,
    ) -> None:
        assert not one_plus or lanes is None, "no model has both"
        order_on_disk = Reordered(lanes) if lanes is not None else None
        self.weight = declare(
            (width,),
            placement,
            f"{name}.weight",
            assembly=OnePlus() if one_plus else order_on_disk,
            init=Init(std=0.0, mean=1.0, stored_mean=0.0) if one_plus else None,
            dtype="float32" if one_plus else None,
        )
        self.eps = eps
        self.order = order

    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.weight[...]
        return normalise(x, weight.astype(jnp.float32) if self.order is NormOrder.SCALE_THEN_CAST else weight, self.eps)


class LayerNorm(RMSNorm):
    """The same of what differs from the mean over the last axis."""

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = centred(x)
        wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        weight = self.weight[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return weigh(wide, weight.astype(jnp.float32) if self.order is NormOrder.SCALE_THEN_CAST else weight, x.dtype)


def centred(x: jax.Array) -> jax.Array:
    """x less its mean over the last axis, in float32."""
    wide = x.astype(jnp.float32)
    return wide - jnp.mean(wide, axis=-1, keepdims=True)


class HeadsNorm(nnx.Module):
    """A norm with a weight for each head, `[T, heads, D]`. Devices may share the heads; each holds all weights.

    Args:
        placement: dtype.
        name: checkpoint prefix.
        heads: over all devices.
        width: D.
        eps: added to the mean square.
        order: where the weight meets the cast.
        lanes: as in RMSNorm.
    """

    in_rows: ClassVar[bool] = True  # whether the checkpoint's weight is [heads, D], not one vector

    def __init__(
        self,
        placement: Placement,
        name: str,
        heads: int,
        width: int,
        eps: float,
        order: NormOrder,
        lanes: tuple[int, ...] | None = None,
    ) -> None:
        assert self.in_rows or lanes is None, "no model has both"
        self.weight = declare(
            (heads, width) if self.in_rows else (heads * width,),
            placement,
            f"{name}.weight",
            assembly=Reordered(lanes) if lanes is not None else None,
            init=Init(std=0.3 if self.in_rows else 0.0, mean=1.0),
            inner=0,
        )
        self.heads = heads
        self.eps = eps
        self.order = order

    def weigh(self, axes: Axes, wide: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Normalised float32 values of this device's heads, weighed. Each head is on as many devices as every other."""
        _, held, width = wide.shape
        weight = self.weight[...].reshape(self.heads, width)
        weight = weight.astype(jnp.float32) if self.order is NormOrder.SCALE_THEN_CAST else weight
        first = axes.index(Axis.HEADS) * self.heads // axes.size(Axis.HEADS)
        return weigh(wide, lax.dynamic_slice_in_dim(weight, first, held)[None], dtype)

    def __call__(self, axes: Axes, x: jax.Array) -> jax.Array:
        """The norm of this device's heads."""
        raise NotImplementedError


class JointHeadNorm(HeadsNorm):
    """RMSNorm of all heads of a token at once."""

    in_rows: ClassVar[bool] = False

    def __call__(self, axes: Axes, x: jax.Array) -> jax.Array:
        """The norm of this device's heads."""
        wide = x.astype(jnp.float32)
        count = axes.size(Axis.HEADS) * x.shape[1] * x.shape[2]
        squares = axes.total(jnp.sum(jnp.square(wide), axis=(1, 2), keepdims=True), Axis.HEADS)
        return self.weigh(axes, wide * lax.rsqrt(squares / count + self.eps), x.dtype)


class EachHeadLayerNorm(HeadsNorm):
    """LayerNorm of each head."""

    def __call__(self, axes: Axes, x: jax.Array) -> jax.Array:
        """The norm of this device's heads."""
        wide = centred(x)
        wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return self.weigh(axes, wide, x.dtype)
