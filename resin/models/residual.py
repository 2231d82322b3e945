"""How a block is added to the residual stream."""

from __future__ import annotations

from typing import Protocol

import jax

from resin.models.forward import Pass
from resin.models.norm import RMSNorm


class Block(Protocol):
    """Attention, a feed-forward layer, a mixture of experts."""

    def __call__(
        self, run: Pass, x: jax.Array, *, norm: RMSNorm | None = None, residual: jax.Array | None = None
    ) -> jax.Array:
        """`residual + block(norm(x))`, `[T, hidden]` -> `[T, hidden]`."""
        ...


def add_block(
    run: Pass,
    x: jax.Array,
    block: Block,
    *,
    before: RMSNorm | None = None,
    after: RMSNorm | None = None,
    scale: float = 1.0,
) -> jax.Array:
    """`x + scale * after(block(before(x)))`; kernels add what nothing more is done to."""
    if after is None and scale == 1:
        return block(run, x, norm=before, residual=x)
    out = block(run, x, norm=before)
    out = out if after is None else after(out)
    return x + (out if scale == 1 else out * scale)
