"""Root-mean-square normalisation."""

from __future__ import annotations

import enum

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


class JointHeadNorm(nnx.Module):
    """RMSNorm of all heads of a token at once, `[T, heads, D]`, which devices may share; each holds the whole weight.

    Args:
        placement: dtype.
        name: checkpoint prefix.
        heads: over all devices.
        width: D.
        eps: added to the mean square.
        order: where the weight meets the cast.
    """

    def __init__(self, placement: Placement, name: str, heads: int, width: int, eps: float, order: NormOrder) -> None:
        self.weight = declare((heads * width,), placement, f"{name}.weight")
        self.heads = heads
        self.eps = eps
        self.order = order

    def __call__(self, axes: Axes, x: jax.Array) -> jax.Array:
        """The norm of this device's heads. Each head is on as many devices as every other."""
        _, held, width = x.shape
        devices = axes.size(Axis.HEADS)
        weight = self.weight[...].reshape(self.heads, width)
        weight = weight.astype(jnp.float32) if self.order is NormOrder.SCALE_THEN_CAST else weight
        weight = lax.dynamic_slice_in_dim(weight, axes.index(Axis.HEADS) * self.heads // devices, held)
        wide = x.astype(jnp.float32)
        squares = axes.total(jnp.sum(jnp.square(wide), axis=(1, 2), keepdims=True), Axis.HEADS)
        wide = wide * lax.rsqrt(squares / (devices * held * width) + self.eps)
        return weigh(wide, weight[None], x.dtype)
