"""Attention over the paged arena in plain XLA, float32 inside: what both paged kernels are held against.

It is the product path on CPU as well: loops have dynamic trip counts, so that one executable serves every length.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from resin.pallas_kernels.fp8 import row_elements, unpack_fp8
from resin.pallas_kernels.paged_prefill import tile_map
from resin.pallas_kernels.tiles import MASKED

# Tokens of one sequence (queries of prefill, too) and of all sequences handled at once: enough for the matrix routines
# of a CPU, few enough that short rows beside a long one waste little (16 sequences: 64 tokens beat 128 by a third).
BLOCK_TOKENS = 128
BATCH_TOKENS = 1024


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
    fp8_scale: float | None = None,
    query_lens: jax.Array | None = None,
    with_lse: bool = False,
    counters: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """`paged_decode_attention`, whose arguments and result these are. Loops over blocks of pages."""
    sequences, count, heads, width = q.shape
    group = heads // kv_heads
    block_pages = max(1, min(BLOCK_TOKENS, BATCH_TOKENS // sequences) // page_entries)
    block_tokens = block_pages * page_entries
    queries = q.astype(jnp.float32).reshape(sequences, count, kv_heads, group, width).swapaxes(1, 2) * scale
    live = jnp.full_like(seq_lens, count) if query_lens is None else query_lens
    query = jnp.arange(count, dtype=jnp.int32)[None, :]
    standing = jnp.where(query < live[:, None], (seq_lens - live)[:, None] + query, -1)
    first = first_position
    if window is not None:
        first = jnp.maximum(first_position, seq_lens - live + 1 - window)

    def attend_block(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        columns = page_indptr[:-1, None] + index * block_pages + jnp.arange(block_pages, dtype=jnp.int32)[None, :]
        pages = page_ids.at[jnp.minimum(columns, page_indptr[1:, None] - 1)].get(mode="clip")
        keys, values = (
            gather_pages(arena, pages, row, kv_heads, page_entries, width, fp8_scale) for row in (key_row, value_row)
        )
        scores = jnp.einsum("bkqgd,bknd->bkqgn", queries, keys, precision=lax.Precision.HIGHEST)
        block_positions = index * block_tokens + jnp.arange(block_tokens, dtype=jnp.int32)
        positions = first_position[:, None] + block_positions[None, :]
        seen = positions[:, None, :] <= standing[:, :, None]
        if window is not None:
            seen &= positions[:, None, :] > standing[:, :, None] - window
        # A page past the row's end is some other page: its weights are zero, but 0 * NaN would not be.
        held = (positions >= first[:, None]) & (positions < seq_lens[:, None])
        values = jnp.where(held[:, None, :, None], values, 0.0)
        return _add_block(carry, scores, seen[:, None, :, None], values, "bkqgn,bknd->bkqgd", softcap)

    top = jnp.full((sequences, kv_heads, count, group), MASKED, jnp.float32)
    carry = (top, jnp.zeros_like(top), jnp.zeros((*top.shape, width), jnp.float32))
    first_block = jnp.min(jnp.where(seq_lens > 0, (first - first_position) // block_tokens, 2**30))
    blocks = jnp.max(-(-(seq_lens - first_position) // block_tokens), initial=0)
    top, total, out = lax.fori_loop(jnp.minimum(first_block, blocks), blocks, attend_block, carry)
    logits = None if sinks is None else sinks.astype(jnp.float32).reshape(1, kv_heads, 1, group)
    out, lse = _finish(top, total, out, logits)
    out, lse = out.swapaxes(1, 2).reshape(q.shape).astype(q.dtype), lse.swapaxes(1, 2).reshape(q.shape[:3])
    return out, lse if with_lse else None, counters


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
    fp8_scale: float | None = None,
    with_lse: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """`paged_prefill_attention`, whose arguments and result these are.

    Loops over (query tile, block of pages) pairs with dynamic trip counts; blocks above the diagonal or before the
    window are skipped.
    """
    tokens, heads, width = q.shape
    group = heads // kv_heads
    tile = min(BLOCK_TOKENS, tokens)
    block_pages = max(1, min(BLOCK_TOKENS, page_ids.shape[0] * page_entries) // page_entries)
    block_tokens = block_pages * page_entries
    tiles = tile_map(query_indptr, tokens, tile)
    padded = jnp.pad(q, ((0, tile), (0, 0), (0, 0)))
    logits = None if sinks is None else sinks.astype(jnp.float32).reshape(kv_heads, group, 1)

    def attend_tile(index: jax.Array, outs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        sequence, start = tiles.sequence[index], tiles.start[index]
        queries = lax.dynamic_slice(padded, (start, 0, 0), (tile, heads, width)).astype(jnp.float32) * scale
        queries = queries.reshape(tile, kv_heads, group, width).transpose(1, 2, 0, 3)
        row_first, row_end = page_indptr[sequence], page_indptr[sequence + 1]
        origin = first_position[sequence]
        begin = start + seq_lens[sequence] - query_indptr[sequence + 1]
        at = begin + jnp.arange(tile, dtype=jnp.int32)
        end = jnp.minimum(begin + tile, seq_lens[sequence])

        def attend_block(block: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            columns = row_first + block * block_pages + jnp.arange(block_pages, dtype=jnp.int32)
            pages = page_ids.at[jnp.minimum(columns, row_end - 1)].get(mode="clip")[None]
            keys, values = (
                gather_pages(arena, pages, row, kv_heads, page_entries, width, fp8_scale)[0]
                for row in (key_row, value_row)
            )
            scores = jnp.einsum("kgtd,knd->kgtn", queries, keys, precision=lax.Precision.HIGHEST)
            positions = origin + block * block_tokens + jnp.arange(block_tokens, dtype=jnp.int32)
            seen = (positions[None, :] <= at[:, None]) & (positions[None, :] < end)
            if window is not None:
                seen &= positions[None, :] > at[:, None] - window
            # The barrier keeps the comparisons from being made again for every head.
            seen = lax.optimization_barrier(seen)[None, None]
            # Pages past the end are some other page: their weights are zero, but 0 * NaN would not be.
            values = jnp.where((positions < end)[None, :, None], values, 0.0)
            return _add_block(carry, scores, seen, values, "kgtn,knd->kgtd", softcap)

        lowest = jnp.maximum(begin - window + 1, origin) if window is not None else origin
        top = jnp.full((kv_heads, group, tile), MASKED, jnp.float32)
        carry = (top, jnp.zeros_like(top), jnp.zeros((kv_heads, group, tile, width), jnp.float32))
        blocks = -(-(end - origin) // block_tokens)
        top, total, acc = lax.fori_loop((lowest - origin) // block_tokens, blocks, attend_block, carry)
        acc, lse = _finish(top, total, acc, logits)
        rows = acc.transpose(2, 0, 1, 3).reshape(tile, heads, width).astype(q.dtype), lse.reshape(heads, tile).T
        # Rows past the sequence's end belong to the next sequence, whose tiles come later and overwrite them.
        return tuple(
            lax.dynamic_update_slice(out, part, (start, *[0] * (out.ndim - 1)))
            for out, part in zip(outs, rows, strict=False)
        )

    outs = (jnp.zeros_like(padded), *([jnp.zeros(padded.shape[:2], jnp.float32)] if with_lse else []))
    outs = lax.fori_loop(0, tiles.live_tiles[0], attend_tile, outs)
    return outs[0][:tokens], outs[1][:tokens] if with_lse else None


def gather_pages(
    arena: jax.Array,
    pages: jax.Array,
    row: jax.Array | int,
    kv_heads: int,
    page_entries: int,
    width: int,
    fp8_scale: float | None = None,
) -> jax.Array:
    """One layer's keys or values in float32: pages `[B, P]` -> `[B, kv_heads, P * page_entries, width]`."""
    num_pages, page_elements = arena.shape
    sequences, count = pages.shape
    elements = row_elements(width, arena.dtype, fp8_scale)
    rows_per_page = page_elements // elements
    head_rows = row + page_entries * jnp.arange(kv_heads, dtype=jnp.int32)
    starts = pages[:, None, :] * rows_per_page + head_rows[None, :, None]
    dimensions = lax.GatherDimensionNumbers(offset_dims=(3, 4), collapsed_slice_dims=(), start_index_map=(0,))
    slabs = lax.gather(
        arena.reshape(num_pages * rows_per_page, elements),
        starts[..., None],
        dimensions,
        (page_entries, elements),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
    if fp8_scale is not None:
        slabs = unpack_fp8(slabs, fp8_scale)
    elif slabs.dtype == jnp.uint16:
        slabs = lax.bitcast_convert_type(slabs, jnp.bfloat16)
    return slabs.reshape(sequences, kv_heads, count * page_entries, width).astype(jnp.float32)


def _add_block(
    sums: tuple[jax.Array, ...],
    scores: jax.Array,
    seen: jax.Array,
    values: jax.Array,
    weigh: str,
    softcap: float | None,
) -> tuple[jax.Array, ...]:
    """Adds one block of keys to the online softmax.

    Args:
        sums: float32 `top` and `total` `[...]` and `out` `[..., D]`, as `_finish` takes them.
        scores: float32 `[..., N]` of the block's keys.
        seen: bool, broadcasts to scores.
        values: float32, of the block's keys.
        weigh: einsum of weights and values.
        softcap: as of the call.
    """
    top, total, out = sums
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(seen, scores, MASKED)
    new_top = jnp.maximum(top, scores.max(-1))
    # A row that has seen nothing yet gets weights of 1, which the first key that it sees scales to zero.
    weights = jnp.exp(scores - new_top[..., None])
    keep = jnp.exp(top - new_top)
    block = jnp.einsum(weigh, weights, values, precision=lax.Precision.HIGHEST)
    return new_top, total * keep + weights.sum(-1), out * keep[..., None] + block


def _finish(top: jax.Array, total: jax.Array, out: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Results and logarithms of denominators, as kernels make them of their sums.

    Args:
        top: float32 `[...]`, largest score, no real one above -1e30 where none was seen.
        total: float32 `[...]`, sum of exp(score - top).
        out: float32 `[..., D]`, values weighted so.
        sinks: float32, broadcasts to top; None for none.
    """
    total = jnp.where(top > MASKED, total, 0.0)
    lse = jnp.log(total) + top
    if sinks is not None:
        lse = jnp.logaddexp(lse, sinks)
        total = total + jnp.exp(sinks - top)
    seen = (top > MASKED)[..., None]
    return jnp.where(seen, out / jnp.where(total > 0, total, 1.0)[..., None], 0.0), lse
