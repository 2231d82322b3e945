"""The inputs before each token of ragged chunks, for short causal filters. T tokens, B sequences, W channels."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def shift_chunks(held: jax.Array, x: jax.Array, query_indptr: jax.Array) -> list[jax.Array]:
    """Looks back over each sequence's state and then its chunk.

    Row `taps + i` of a sequence's history (state, then chunk) is its i-th token, so k tokens before token i is row
    `taps + i - k`: of the state while i < k, of the chunk from then on.

    Args:
        held: [B, taps, W], the inputs before each chunk, the oldest first.
        x: [T, W], the chunks one after another.
        query_indptr: int32 [B + 1], where they start and end.

    Returns:
        `taps` arrays [T, W], the input `taps` tokens ago first.
    """
    taps, starts, ends = held.shape[1], query_indptr[:-1], query_indptr[1:]
    token = jnp.arange(x.shape[0], dtype=jnp.int32)
    sequence = jnp.searchsorted(ends, token, side="right", method="compare_all").astype(jnp.int32)
    sequence = jnp.minimum(sequence, starts.shape[0] - 1)  # padding after the last chunk
    place = token - starts[sequence]
    before = []
    for back in range(taps, 0, -1):
        shifted = jnp.pad(x, ((back, 0), (0, 0)))[: x.shape[0]]
        old = held[sequence, jnp.clip(taps + place - back, 0, taps - 1)]
        before.append(jnp.where((place >= back)[:, None], shifted, old))
    return before
