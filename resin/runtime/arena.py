"""Device memory that a runner keeps: the arena and the slot table."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def allocate(abstract: Any) -> Any:
    """Zeros of the abstract shapes, made on their devices with their shardings."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(
        lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract), out_shardings=shardings
    )()
