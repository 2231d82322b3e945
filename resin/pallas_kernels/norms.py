"""RMSNorms: the reference, and where the weight meets the cast back from float32.

A weight of the activations' dtype comes after the cast, a float32 one before it: models differ, and bfloat16 shows it.
Head norms in kernels round alike. A product's kernel does not: it weighs x as it reads it, and divides its sums by the
root mean square that it knows at the end (`dense_body`), which rounds once, elsewhere.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def normalise(x: jax.Array, weight: jax.Array | None, eps: float) -> jax.Array:
    """The RMSNorm of x `[..., K]` in plain XLA; x itself without a weight `[K]`."""
    if weight is None:
        return x
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return weigh(wide, weight.reshape((1,) * (x.ndim - 1) + (-1,)), x.dtype)


def weigh(wide: jax.Array, weight: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Normalised float32 values times a norm's weight: after the cast, or before it where the weight is float32."""
    if weight.dtype == dtype:
        return wide.astype(dtype) * weight
    return (wide * weight.astype(jnp.float32)).astype(dtype)
