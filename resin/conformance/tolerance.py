"""How far two computations of the same numbers may part: what rounding does, and no more.

Two orders of summation of a product over K inputs differ by rounding errors that add up like a random walk, by about
sqrt(K) units of roundoff of the product's size. On the way from token to logits one product follows another and the
squares of their errors add up, so that logits of deviation s differ by about `roundoff * sqrt(sum K) * s`: 1.9e-5 s in
float32 for SmolLM2-135M (30 layers, sum 98496), 5.5e-5 s for Llama-3.1-8B.

Measured on one CPU, the largest of some thousand differences of tiny models of every family was 1 to 2.5 times that, of
SmolLM2-135M on another 0.6 times. A page or a position that is wrong shifts logprobs by a hundred times more.
"""

from __future__ import annotations

import math

import jax.numpy as jnp

from resin.models.weights import AbstractModel

# Times the deviation of a difference that the largest one may be.
ENGINE_SPREADS = 8
# The same between two implementations, which also make their frequencies, angles and constants apart.
REFERENCE_SPREADS = 32
# Times what plain bfloat16 strays from float32 that bfloat16 in kernels may, which keep other sums in float32.
SERVING_SPREADS = 3
# Two orders of summation can round one 8-bit key to different neighbours, a sixteenth apart.
FP8_SHARE = 1e-2


def rounding_share(model: AbstractModel, dtype: str) -> float:
    """Deviation that rounding alone gives a logit, as a share of the logits' deviation.

    Args:
        model: whose matrices follow each other.
        dtype: of the products' operands.
    """
    inner = sum(item.inner for item in model.declarations if item.flops_per_token)
    return float(jnp.finfo(dtype).eps) / 2 * math.sqrt(inner)
