"""Root-mean-square normalisation."""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
from flax import nnx

from resin.models.assemblies import OnePlus, Reordered
from resin.models.declare import Init, Placement, declare
from resin.pallas_kernels.norms import normalise


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
