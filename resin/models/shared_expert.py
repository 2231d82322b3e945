"""Mixtures of experts with one more expert, which every token takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from resin.models.assemblies import Transposed
from resin.models.declare import Placement, declare
from resin.models.experts import MixtureOfExperts
from resin.models.forward import Pass
from resin.models.mlp import GatedMLP
from resin.models.norm import RMSNorm


class SharedExpert(nnx.Module):
    """`experts(x) + share(x) * shared(x)`, the share a learned sigmoid or 1.

    Args:
        placement: dtype and mesh.
        experts: those that a router gives.
        shared: the one of all tokens.
        hidden: width of the residual stream.
        share: checkpoint prefix of what scores the share; None for 1.
    """

    def __init__(
        self,
        placement: Placement,
        experts: MixtureOfExperts,
        shared: GatedMLP,
        *,
        hidden: int,
        share: str | None = None,
    ) -> None:
        self.experts = experts
        self.shared = shared
        self.share = (
            declare((hidden, 1), placement, f"{share}.weight", assembly=Transposed()) if share is not None else None
        )

    def __call__(
        self, run: Pass, x: jax.Array, *, norm: RMSNorm | None = None, residual: jax.Array | None = None
    ) -> jax.Array:
        """`residual + experts(norm(x)) + share * shared(norm(x))`, `[T, hidden]` -> `[T, hidden]`."""
        out = self.experts(run, x, norm=norm, residual=residual)
        with jax.named_scope("shared_expert"):
            if self.share is None:
                return self.shared(run, x, norm=norm, residual=out)
            score = jnp.matmul(x if norm is None else norm(x), self.share[...], preferred_element_type=jnp.float32)
            return out + jax.nn.sigmoid(score).astype(x.dtype) * self.shared(run, x, norm=norm)
