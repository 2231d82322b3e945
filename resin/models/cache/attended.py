"""The result of attention, and one softmax over several sets of keys. T tokens, H query heads, D head size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Attended(NamedTuple):
    """Attention to one set of keys.

    Attributes:
        out: [T, H, D], values weighted by the softmax over these keys.
        lse: float32 [T, H], log of the softmax's denominator; -inf for a query that sees none of the keys. None
            where it was not asked for.
    """

    out: jax.Array
    lse: jax.Array | None = None


def merge(parts: Sequence[Attended], sinks: jax.Array | None = None) -> Attended:
    """Attention to all the sets of keys under one softmax.

    Args:
        parts: attention to each set, with its lse.
        sinks: [H] logits that only add to the denominator.
    """
    lses = [part.lse for part in parts]
    assert all(lse is not None for lse in lses), "attention that is merged has to be asked for its lse"
    stacked = jnp.stack([jnp.asarray(lse) for lse in lses])
    if sinks is not None:
        bias = jnp.broadcast_to(sinks.astype(jnp.float32)[None, None, :], (1, *stacked.shape[1:]))
        lse = jax.nn.logsumexp(jnp.concatenate([stacked, bias]), axis=0)
    else:
        lse = jax.nn.logsumexp(stacked, axis=0)
    # Where no set has a key that a query sees, every share is exp(-inf - 0).
    shares = jnp.exp(stacked - jnp.where(jnp.isneginf(lse), 0.0, lse)[None])
    weighted = [share[:, :, None] * part.out.astype(jnp.float32) for share, part in zip(shares, parts, strict=True)]
    return Attended(sum(weighted[1:], weighted[0]).astype(parts[0].out.dtype), lse)
