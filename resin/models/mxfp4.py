"""MXFP4 on the device: 4-bit values (e2m1), two a byte, with one power-of-two scale for 32 of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

GROUP_VALUES = 32
BLOCK_BYTES = 16


def unpack_mxfp4(blocks: jax.Array, scales: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Decodes rows of a packed matrix.

    Args:
        blocks: uint8 [rows, groups, 16]; the low nibble is the even index.
        scales: uint8 [rows, groups], exponent biased by 127; bytes 1 to 254.
        dtype: of the result.

    Returns:
        [rows, groups * 32]. Exact in bfloat16: a value has two significant bits.
    """
    codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1).astype(jnp.int32)
    exponent, fraction = (codes >> 1) & 3, codes & 1
    # Twice the magnitude, an integer: 0, 1, then (2 + fraction) * 2^(exponent - 1), that is 2 3 4 6 8 12.
    doubled = jnp.where(exponent == 0, fraction, (2 + fraction) << jnp.maximum(exponent - 1, 0))
    values = jnp.where(codes >= 8, -doubled, doubled).astype(jnp.float32) * 0.5
    scale = lax.bitcast_convert_type(scales.astype(jnp.uint32) << 23, jnp.float32)
    rows, groups = scales.shape
    return (values * scale[:, :, None, None]).astype(dtype).reshape(rows, groups * GROUP_VALUES)
