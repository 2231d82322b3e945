"""Ragged causal prefill attention over the paged arena: many sequences packed, each a chunk after a cached prefix.

Token t of sequence b (`query_indptr[b] <= t < query_indptr[b + 1]`) stands at position
`seq_lens[b] - (query_indptr[b + 1] - t)` and attends to the positions up to its own that its window admits, all of
which lie in the arena already (the chunk's own keys were appended before). Arena layout as in `paged_decode`.

Work is cut into query tiles of a fixed size, each within one sequence; `tile_map` computes them from `query_indptr`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from resin.pallas_kernels.paged_decode import gather_pages
from resin.pallas_kernels.tiles import MASKED

# Query rows and keys that the reference handles at once: sized for the matrix routines of a CPU.
REFERENCE_TILE_TOKENS = 128
REFERENCE_BLOCK_TOKENS = 256


class TileMap(NamedTuple):
    """Query tiles in token order; entries past `count` are padding with `sequence` = number of sequences."""

    count: jax.Array  # int32 [], live tiles
    sequence: jax.Array  # int32 [tiles]
    start: jax.Array  # int32 [tiles], first token of the tile


def tile_map(query_indptr: jax.Array, tokens: int, tile_tokens: int) -> TileMap:
    """Cuts each sequence's query tokens into tiles of `tile_tokens`; at most `tokens // tile_tokens + B` of them."""
    sequences = query_indptr.shape[0] - 1
    tiles_max = tokens // tile_tokens + min(sequences, tokens)
    lengths = query_indptr[1:] - query_indptr[:-1]
    ends = jnp.cumsum(-(-lengths // tile_tokens), dtype=jnp.int32)
    index = jnp.arange(tiles_max, dtype=jnp.int32)
    sequence = jnp.sum(index[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
    held = jnp.minimum(sequence, sequences - 1)
    first_tile = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])[held]
    return TileMap(ends[-1], sequence, query_indptr[held] + (index - first_tile) * tile_tokens)


def paged_prefill_attention_ref(
    q: jax.Array,
    arena: jax.Array,
    page_indptr: jax.Array,
    page_ids: jax.Array,
    query_indptr: jax.Array,
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

    Loops over (query tile, block of pages) pairs with dynamic trip counts; blocks above the diagonal or before the
    window are skipped. Arguments and result as in `paged_prefill_attention`.
    """
    tokens, heads, width = q.shape
    group = heads // kv_heads
    tile = min(REFERENCE_TILE_TOKENS, tokens)
    block_pages = max(1, min(REFERENCE_BLOCK_TOKENS, page_ids.shape[0] * page_entries) // page_entries)
    block_tokens = block_pages * page_entries
    tiles = tile_map(query_indptr, tokens, tile)
    padded = jnp.pad(q, ((0, tile), (0, 0), (0, 0)))

    def attend_tile(index: jax.Array, out: jax.Array) -> jax.Array:
        sequence, start = tiles.sequence[index], tiles.start[index]
        queries = lax.dynamic_slice(padded, (start, 0, 0), (tile, heads, width)).astype(jnp.float32) * scale
        queries = queries.reshape(tile, kv_heads, group, width).transpose(1, 2, 0, 3)
        row_first, row_end = page_indptr[sequence], page_indptr[sequence + 1]
        origin = first_position[sequence]
        begin = start + seq_lens[sequence] - query_indptr[sequence + 1]
        at = begin + jnp.arange(tile, dtype=jnp.int32)
        end = jnp.minimum(begin + tile, seq_lens[sequence])

        def attend_block(block: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            top, total, acc = carry
            columns = row_first + block * block_pages + jnp.arange(block_pages, dtype=jnp.int32)
            pages = page_ids.at[jnp.minimum(columns, row_end - 1)].get(mode="clip")[None]
            keys = gather_pages(arena, pages, key_row, kv_heads, page_entries, width)[0]
            values = gather_pages(arena, pages, value_row, kv_heads, page_entries, width)[0]
            scores = jnp.einsum("kgtd,knd->kgtn", queries, keys, precision=lax.Precision.HIGHEST)
            if softcap is not None:
                scores = softcap * jnp.tanh(scores / softcap)
            positions = origin + block * block_tokens + jnp.arange(block_tokens, dtype=jnp.int32)
            seen = (positions[None, :] <= at[:, None]) & (positions[None, :] < end)
            if window is not None:
                seen &= positions[None, :] > at[:, None] - window
            scores = jnp.where(seen, scores, MASKED)
            new_top = jnp.maximum(top, scores.max(-1))
            weights = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0.0)
            keep = jnp.exp(top - new_top)
            # Pages past the end are some other page: their weights are zero, but 0 * NaN would not be.
            values = jnp.where((positions < end)[None, :, None], values, 0.0)
            acc = acc * keep[..., None] + jnp.einsum("kgtn,knd->kgtd", weights, values, precision=lax.Precision.HIGHEST)
            return new_top, total * keep + weights.sum(-1), acc

        lowest = jnp.maximum(begin - window + 1, origin) if window is not None else origin
        top = jnp.full((kv_heads, group, tile), MASKED, jnp.float32)
        carry = (top, jnp.zeros_like(top), jnp.zeros((kv_heads, group, tile, width), jnp.float32))
        blocks = -(-(end - origin) // block_tokens)
        top, total, acc = lax.fori_loop((lowest - origin) // block_tokens, blocks, attend_block, carry)
        if sinks is not None:
            total = total + jnp.exp(sinks.astype(jnp.float32).reshape(kv_heads, group, 1) - top)
        acc = acc / jnp.where(total > 0, total, 1.0)[..., None]
        rows = acc.transpose(2, 0, 1, 3).reshape(tile, heads, width).astype(q.dtype)
        # Rows past the sequence's end belong to the next sequence, whose tiles come later and overwrite them.
        return lax.dynamic_update_slice(out, rows, (start, 0, 0))

    out = lax.fori_loop(0, tiles.count, attend_tile, jnp.zeros_like(padded))
    return out[:tokens]
