"""What kernel bodies share: tile products, loads of cache rows, constants of the online softmax."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

MASKED = -1e30  # a masked score; finite, so that a fully masked block gives weights that a later correction zeroes
LOG2E = math.log2(math.e)
MIN_ROWS = 16  # rows of the smallest tensor-core product


def tile_dot(a: jax.Array, b: jax.Array, *, trans_b: bool = False) -> jax.Array:
    """`a @ b` or `a @ b.T` of two tiles in float32; float32 operands keep full precision."""
    exact = a.dtype == jnp.float32
    return lax.dot_general(
        a,
        b,
        (((1,), (1 if trans_b else 0,)), ((), ())),
        precision=lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )


def load_rows(arena_ref, rows: jax.Array, lanes: jax.Array, inside: jax.Array | None, dtype) -> jax.Array:
    """Tile `[len(rows), len(lanes)]` of a `[rows, width]` view of the arena, zero outside; uint16 holds bfloat16 bits."""
    other = None if inside is None else 0
    loaded = plgpu.load(arena_ref.at[rows[:, None], lanes[None, :]], mask=inside, other=other)
    return lax.bitcast_convert_type(loaded, dtype) if loaded.dtype == jnp.uint16 else loaded
