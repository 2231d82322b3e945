"""Causal attention of one prompt to itself: T tokens, their own keys and values, nothing cached before them.

q is `[T, H, D]`, k and v `[T, K, D]`, contiguous; no page is read. Grid and tiles are cuDNN's (`implementation="xla"`
computes the same in plain XLA, for tests). Padding comes last, so that causality keeps it from the tokens before it;
but its keys and values meet weights of zero, and 0 * NaN is NaN: padding has to be finite.

On an H200 one prompt of 8192 tokens at the 8B shape (32 query and 8 KV heads of 128) takes about 900 us, through pages
1400 us.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

# Head sizes that cuDNN's attention takes on every GPU since Ampere: multiples of 8 up to here.
MAX_WIDTH = 128


def fits_fresh_prefill(
    dtype: jax.typing.DTypeLike,
    width: int,
    *,
    window: int | None = None,
    sinks: jax.Array | None = None,
    softcap: float | None = None,
    fp8_scale: float | None = None,
) -> bool:
    """Whether a layer can take `fresh_prefill_attention` instead of `paged_prefill`; arguments as there.

    Args:
        dtype: of the activations.
        width: head size.
        window, sinks, softcap, fp8_scale: the layer's options.
    """
    has_options = any(option is not None for option in (window, sinks, softcap, fp8_scale))
    return jnp.dtype(dtype) == jnp.bfloat16 and width <= MAX_WIDTH and width % 8 == 0 and not has_options


def fresh_prefill_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float, implementation: Literal["cudnn", "xla"] = "cudnn"
) -> jax.Array:
    """Attention of each token to itself and those before it.

    Args:
        q: `[T, H, D]`, H a multiple of K.
        k, v: `[T, K, D]`, finite everywhere.
        scale: factor of q . k.
        implementation: "cudnn" or "xla".

    Returns:
        `[T, H, D]` in q's dtype.
    """
    with jax.numpy_dtype_promotion("standard"):  # plain XLA's attention counts on it
        out = jax.nn.dot_product_attention(
            q[None], k[None], v[None], scale=scale, is_causal=True, implementation=implementation
        )
    return out[0]
