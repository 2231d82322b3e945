"""Decode attention over the paged arena: one query token a sequence.

out[b, h] = sum_j softmax_j(cap(scale * q[b, h] . K[j])) V[j] over the positions j that sequence b holds and its
window admits; a sink adds exp(sinks[h]) to the denominator.

Arena layout: `[num_pages, page_elements]`. A layer's keys are `[kv_heads, page_entries, head_dim]`, `key_row` rows of
head_dim elements after the start of a page; its values likewise at `value_row`. Rows are addressed as
`page * (page_elements / head_dim) + row`, which stays below 2^31 where element indices do not.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

# Tokens that the reference handles at once. 128 keeps a block of a 3 x 64 cache in the first-level cache of a CPU.
REFERENCE_BLOCK_TOKENS = 128

MASKED = -1e30  # finite, so that a fully masked block gives exp(0) weights that a later correction scales to zero


def paged_decode_attention_ref(
    q: jax.Array,
    arena: jax.Array,
    page_indptr: jax.Array,
    page_ids: jax.Array,
    seq_lens: jax.Array,
    first_position: jax.Array,
    key_row: jax.Array | int,
    value_row: jax.Array | int,
    *,
    kv_heads: int,
    page_entries: int,
    scale: float,
    window: int | None = None,
    sinks: jax.Array | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """The same function in plain XLA, float32 inside; the product path on CPU.

    Loops over blocks of pages with a dynamic trip count and an online softmax, so one executable serves every length.
    Arguments and result as in `paged_decode_attention`.
    """
    sequences, heads, width = q.shape
    group = heads // kv_heads
    block_pages = max(1, REFERENCE_BLOCK_TOKENS // page_entries)
    block_tokens = block_pages * page_entries
    queries = q.astype(jnp.float32).reshape(sequences, kv_heads, group, width) * scale
    last = seq_lens - 1
    first = jnp.maximum(first_position, seq_lens - window) if window is not None else first_position

    def attend_block(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, out = carry
        columns = page_indptr[:-1, None] + index * block_pages + jnp.arange(block_pages, dtype=jnp.int32)
        pages = page_ids.at[jnp.minimum(columns, page_indptr[1:, None] - 1)].get(mode="clip")
        keys = gather_pages(arena, pages, key_row, kv_heads, page_entries, width)
        values = gather_pages(arena, pages, value_row, kv_heads, page_entries, width)
        scores = jnp.einsum("bkgd,bknd->bkgn", queries, keys, precision=lax.Precision.HIGHEST)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        positions = first_position[:, None] + index * block_tokens + jnp.arange(block_tokens, dtype=jnp.int32)
        seen = (positions >= first[:, None]) & (positions <= last[:, None])
        scores = jnp.where(seen[:, None, None], scores, MASKED)
        new_top = jnp.maximum(top, scores.max(-1))
        weights = jnp.where(seen[:, None, None], jnp.exp(scores - new_top[..., None]), 0.0)
        keep = jnp.exp(top - new_top)
        total = total * keep + weights.sum(-1)
        # A page past the row's end is some other page: its weights are zero, but 0 * NaN would not be.
        values = jnp.where(seen[:, None, :, None], values, 0.0)
        block = jnp.einsum("bkgn,bknd->bkgd", weights, values, precision=lax.Precision.HIGHEST)
        return new_top, total, out * keep[..., None] + block

    top = jnp.full((sequences, kv_heads, group), MASKED, jnp.float32)
    carry = (top, jnp.zeros_like(top), jnp.zeros((sequences, kv_heads, group, width), jnp.float32))
    first_block = jnp.min(jnp.where(seq_lens > 0, (first - first_position) // block_tokens, 2**30))
    blocks = jnp.max(-(-(seq_lens - first_position) // block_tokens), initial=0)
    top, total, out = lax.fori_loop(jnp.minimum(first_block, blocks), blocks, attend_block, carry)
    if sinks is not None:
        total = total + jnp.exp(sinks.astype(jnp.float32).reshape(kv_heads, group) - top)
    out = out / jnp.where(total > 0, total, 1.0)[..., None]
    return out.reshape(sequences, heads, width).astype(q.dtype)


def gather_pages(
    arena: jax.Array, pages: jax.Array, row: jax.Array | int, kv_heads: int, page_entries: int, width: int
) -> jax.Array:
    """One layer's keys or values of some pages in float32: pages `[B, P]` -> `[B, kv_heads, P * page_entries, width]`."""
    num_pages, page_elements = arena.shape
    sequences, count = pages.shape
    rows_per_page = page_elements // width
    head_rows = row + page_entries * jnp.arange(kv_heads, dtype=jnp.int32)
    starts = pages[:, None, :] * rows_per_page + head_rows[None, :, None]
    dimensions = lax.GatherDimensionNumbers(offset_dims=(3, 4), collapsed_slice_dims=(), start_index_map=(0,))
    slabs = lax.gather(
        arena.reshape(num_pages * rows_per_page, width),
        starts[..., None],
        dimensions,
        (page_entries, width),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
    if slabs.dtype == jnp.uint16:
        slabs = lax.bitcast_convert_type(slabs, jnp.bfloat16)
    return slabs.reshape(sequences, kv_heads, count * page_entries, width).astype(jnp.float32)
