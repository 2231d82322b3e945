"""Ragged causal prefill attention over the paged arena: many sequences packed, each a chunk after a cached prefix.

Token t of sequence b (`query_indptr[b] <= t < query_indptr[b + 1]`) stands at position
`seq_lens[b] - (query_indptr[b + 1] - t)` and attends to the positions up to its own that its window admits, all of
which lie in the arena already (the chunk's own keys were appended before). Arena layout as in `paged_decode`.

Work is cut into query tiles, each within one sequence; `tile_map` computes them from `query_indptr`. Grid:
(tiles, kv_heads), the last tiles of the batch first because causal tiles grow towards the end. The rows of a tile
are (token, query head of the KV head) pairs, so that all heads of a group share every load of keys and values, which
is also one contiguous piece of q. Blocks that every row sees whole run without masks, before those on an edge.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from resin.pallas_kernels.fp8 import check_kernel_arena, row_elements
from resin.pallas_kernels.paged_decode import gather_pages
from resin.pallas_kernels.tiles import (
    LOG2E,
    MASKED,
    NO_TOP,
    dot_pieces,
    exp2_affine,
    load_rows,
    piece_lanes,
    plane_rows,
    tile_dot,
)

# Query rows and keys that the reference handles at once: sized for the matrix routines of a CPU.
REFERENCE_TILE_TOKENS = 128
REFERENCE_BLOCK_TOKENS = 128


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """Rows (tokens x heads of a group) of a query tile, keys a block, warps and pipeline depth.

    The rows are worked on in `parts`, one after another, so that the products of one part run under the softmax of
    the next.
    """

    rows: int = 128
    block_tokens: int = 64
    num_warps: int = 4
    num_stages: int = 4
    parts: int = 1


def choose_prefill_tiles(tokens: int, group: int, width: int) -> PrefillTiles:
    """128 rows in two parts where there are rows for them.

    Measured on an H200 (32 query and 8 KV heads of 128, 16-token pages) for one causal prompt of 16384 and four of 2048
    tokens: 475 and 370 TFLOP/s; in one part 438 and 337; with 8 warps at most 450 and 349; cuDNN on contiguous arrays
    661 and 492. Two blocks of 4 warps share a multiprocessor and hide each other's softmax.

    Args:
        tokens: padded tokens T.
        group: query heads a KV head.
        width: head size.
    """
    if width > 128:
        return PrefillTiles(rows=64, block_tokens=32)
    if tokens * group <= 64:
        return PrefillTiles(rows=64)
    return PrefillTiles(rows=128, parts=2)


def paged_prefill_attention(
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
    tiles: PrefillTiles | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention of packed query tokens to the pages of their sequences.

    Args:
        q: `[T, H, D]`, tokens of all sequences one after another, H a multiple of kv_heads.
        arena: `[num_pages, page_elements]` in q's dtype, or uint16 that holds bfloat16 bits.
        page_indptr: int32 `[B + 1]`, the pages of sequence b are `page_ids[page_indptr[b]:page_indptr[b + 1]]`.
        page_ids: int32 `[row_pages]`, chronological within a sequence.
        query_indptr: int32 `[B + 1]`, the tokens of sequence b.
        seq_lens: int32 `[B]`, tokens of the sequence, these included.
        first_position: int32 `[B]`, position of the first entry of the sequence's first page.
        key_row, value_row: int32 scalars, rows of D elements from a page's start to the layer's keys and values.
        kv_heads, page_entries: the layer's KV heads on this device, entries a page.
        scale: factor of q . k.
        window: positions that a query sees, its own included; None sees all.
        sinks: float32 `[H]` logits that take part in the softmax and carry no value.
        softcap: scores become `softcap * tanh(score / softcap)`.
        fp8_scale: as in `paged_decode`.
        tiles: overrides the choice of tiles.
        interpret: run the kernel body in Pallas' interpreter.

    Returns:
        `[T, H, D]` in q's dtype; rows of tokens that belong to no sequence are undefined.
    """
    tokens, heads, width = q.shape
    group = heads // kv_heads
    if tiles is None:
        tiles = choose_prefill_tiles(tokens, group, width)
    check_kernel_arena(arena.dtype, fp8_scale)
    elements = row_elements(width, arena.dtype, fp8_scale)
    spec = _Spec(
        group=group,
        width=elements,
        pieces=width // elements,
        page_entries=page_entries,
        rows_per_page=arena.shape[1] // elements,
        scale=scale if fp8_scale is None else scale * fp8_scale,
        value_scale=fp8_scale or 1.0,
        window=window,
        has_sinks=sinks is not None,
        softcap=softcap,
        tiles=tiles,
        interpret=interpret,
    )
    tiling = tile_map(query_indptr, tokens, spec.tile_tokens)
    planes = plane_rows(key_row, value_row)
    return _call(
        spec,
        (q, arena.reshape(-1, elements), page_indptr, page_ids, query_indptr, seq_lens, first_position, planes),
        tiling,
        None if sinks is None else sinks.astype(jnp.float32),
    )


@functools.partial(jax.jit, static_argnums=0)
def _call(spec: _Spec, operands: tuple[jax.Array, ...], tiling: TileMap, sinks: jax.Array | None) -> jax.Array:
    """The kernel call. Nested jit: the layers of a model trace and lower it once."""
    inputs = [
        *operands,
        tiling.live_tiles.reshape(1),
        tiling.sequence,
        tiling.start,
        *([] if sinks is None else [sinks]),
    ]
    return pl.pallas_call(
        functools.partial(_prefill_kernel, spec=spec),
        grid=(tiling.start.shape[0], operands[0].shape[1] // spec.group),
        out_shape=jax.ShapeDtypeStruct(operands[0].shape, operands[0].dtype),
        compiler_params=plgpu.CompilerParams(num_warps=spec.tiles.num_warps, num_stages=spec.tiles.num_stages),
        interpret=spec.interpret,
        name="paged_prefill",
    )(*inputs)


@dataclass(frozen=True, slots=True)
class _Spec:
    """Everything static about one call."""

    group: int
    width: int  # of a piece
    pieces: int
    page_entries: int
    rows_per_page: int
    scale: float
    value_scale: float
    window: int | None
    has_sinks: bool
    softcap: float | None
    tiles: PrefillTiles
    interpret: bool

    @property
    def tile_tokens(self) -> int:
        """Tokens of a query tile."""
        return self.tiles.rows // self.group

    @property
    def part_rows(self) -> int:
        return self.tiles.rows // self.tiles.parts

    @property
    def columns(self) -> int:
        """Width of a piece, rounded up to a power of two."""
        return pl.next_power_of_2(self.width)

    def lanes(self, piece: int) -> jax.Array:
        """Columns of q and of the result that belong to a piece."""
        return piece_lanes(piece, self.width, jnp.arange(self.columns, dtype=jnp.int32))


class _Tile(NamedTuple):
    """One query tile inside the kernel. Entries count from the sequence's first page."""

    row_first: jax.Array  # the sequence's first page row
    head: jax.Array  # KV head
    first_entry: jax.Array  # the entry its first token stands at
    entries: jax.Array  # entries that any row sees, from 0


class _Part(NamedTuple):
    """Some rows of a tile."""

    token: jax.Array  # [rows]
    heads: jax.Array  # [rows], query heads
    live: jax.Array  # [rows], False past the sequence's end
    entry: jax.Array  # [rows], the entry each row stands at
    q: tuple[jax.Array, ...]  # [rows, columns] each


def _prefill_kernel(
    q_ref, arena_ref, indptr_ref, ids_ref, query_ref, lens_ref, first_ref, planes_ref,
    count_ref, sequence_ref, start_ref, *refs, spec: _Spec,
):  # fmt: skip
    sinks_ref = refs[0] if spec.has_sinks else None
    out_ref = refs[-1]
    place, head = pl.num_programs(0) - 1 - pl.program_id(0), pl.program_id(1)

    @pl.when(place < count_ref[0])
    def _():
        sequence, start = sequence_ref[place], start_ref[place]
        query_end = query_ref[sequence + 1]
        # Token t stands at entry t + shift.
        shift = lens_ref[sequence] - query_end - first_ref[sequence]
        lanes = jnp.arange(spec.columns, dtype=jnp.int32)
        parts = []
        for index in range(spec.tiles.parts):
            rows = index * spec.part_rows + jnp.arange(spec.part_rows, dtype=jnp.int32)
            token, heads = start + rows // spec.group, head * spec.group + rows % spec.group
            live = (rows < spec.tile_tokens * spec.group) & (token < query_end)
            inside = live[:, None] & (lanes < spec.width)[None, :]
            q = tuple(
                plgpu.load(q_ref.at[token[:, None], heads[:, None], spec.lanes(piece)[None, :]], mask=inside, other=0)
                for piece in range(spec.pieces)
            )
            parts.append(_Part(token, heads, live, token + shift, q))
        entries = jnp.minimum(start + spec.tile_tokens, query_end) + shift
        tile = _Tile(indptr_ref[sequence], head, start + shift, entries)
        sums = _attend(arena_ref, ids_ref, planes_ref, tile, parts, spec)
        for part, (top, total, out) in zip(parts, sums, strict=True):
            if sinks_ref is not None:
                sinks = plgpu.load(sinks_ref.at[part.heads], mask=part.live, other=0.0)
                total = total + jnp.exp2(sinks * LOG2E - top)
            inside = part.live[:, None] & (lanes < spec.width)[None, :]
            for piece, tile_out in enumerate(out):
                tile_out = tile_out / jnp.where(total > 0, total, 1.0)[:, None]
                if spec.value_scale != 1.0:
                    tile_out = tile_out * spec.value_scale
                at = (part.token[:, None], part.heads[:, None], spec.lanes(piece)[None, :])
                plgpu.store(out_ref.at[at], tile_out.astype(out_ref.dtype), mask=inside)


def _attend(arena_ref, ids_ref, planes_ref, tile: _Tile, parts: list[_Part], spec: _Spec):
    """The online softmax over all blocks that the tile sees: (top, total, out) of each part."""
    block = spec.tiles.block_tokens
    carry = [
        (
            jnp.full((spec.part_rows,), NO_TOP, jnp.float32),
            jnp.zeros((spec.part_rows,), jnp.float32),
            (jnp.zeros((spec.part_rows, spec.columns), jnp.float32),) * spec.pieces,
        )
        for _ in parts
    ]
    walk = functools.partial(_attend_block, arena_ref, ids_ref, planes_ref, tile, parts, spec)
    whole_end = (tile.first_entry + 1) // block
    end = pl.cdiv(tile.entries, block)
    begin = inner = jnp.int32(0)
    if spec.window is not None:
        begin = jnp.maximum(tile.first_entry - spec.window + 1, 0) // block
        # Blocks from `inner` on lie within the window of the last row, and so of every row.
        inner = pl.cdiv(jnp.maximum(tile.first_entry + spec.tile_tokens - spec.window, 0), block)
        inner = jnp.clip(inner, begin, end)
        whole_end = jnp.maximum(whole_end, inner)
    low_edge = inner - begin

    def walk_edge(index, carry):
        return walk(True, jnp.where(index < low_edge, begin + index, whole_end + index - low_edge), carry)

    # Edges first: with the whole blocks first, ptxas serialises every wgmma of the kernel (C7515).
    carry = lax.fori_loop(0, low_edge + end - whole_end, walk_edge, carry)
    return lax.fori_loop(inner, whole_end, functools.partial(walk, False), carry)


def _attend_block(arena_ref, ids_ref, planes_ref, tile: _Tile, parts, spec: _Spec, edge: bool, index, carry):
    """One block of the online softmax; `edge` blocks hold entries that some row must not see."""
    lanes = jnp.arange(spec.columns, dtype=jnp.int32)
    entry = index * spec.tiles.block_tokens + jnp.arange(spec.tiles.block_tokens, dtype=jnp.int32)
    held = entry < tile.entries
    pages = plgpu.load(
        ids_ref.at[tile.row_first + entry // spec.page_entries],
        mask=held if edge else None,
        other=0 if edge else None,
    )
    rows = pages * spec.rows_per_page + tile.head * spec.page_entries + entry % spec.page_entries
    inside = None
    if edge or spec.columns != spec.width:
        inside = (lanes < spec.width)[None, :] & (held[:, None] if edge else (entry >= 0)[:, None])
    dtype = parts[0].q[0].dtype
    keys, values = (
        load_rows(arena_ref, rows + planes_ref[plane], lanes, inside, dtype, spec.pieces > 1) for plane in (0, 1)
    )
    scores = [dot_pieces(part.q, keys) for part in parts]
    return [
        _accumulate(spec, part, entry, values, score, edge, *sums)
        for part, score, sums in zip(parts, scores, carry, strict=True)
    ]


def _accumulate(spec: _Spec, part: _Part, entry, values, scores, edge: bool, top, total, out):
    """Adds one block's scores to a part's sums."""
    factor = spec.scale * LOG2E
    if spec.softcap is not None:
        scores = jnp.tanh(scores * (spec.scale / spec.softcap))
        factor = spec.softcap * LOG2E
    if edge:
        seen = entry[None, :] <= part.entry[:, None]
        if spec.window is not None:
            seen &= entry[None, :] > part.entry[:, None] - spec.window
        scores = jnp.where(seen, scores, MASKED)
    new_top = jnp.maximum(top, jnp.max(scores, axis=1) * factor)
    weights = exp2_affine(scores, factor, new_top[:, None], interpret=spec.interpret)
    keep = exp2_affine(top, 1.0, new_top, interpret=spec.interpret)
    total = total * keep + jnp.sum(weights, axis=1)
    weights = weights.astype(values[0].dtype)
    out = tuple(piece * keep[:, None] + tile_dot(weights, value) for piece, value in zip(out, values, strict=True))
    return new_top, total, out


class TileMap(NamedTuple):
    """Query tiles in token order; entries past `live_tiles` are padding with `sequence` = number of sequences."""

    live_tiles: jax.Array  # int32 []
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
    fp8_scale: float | None = None,
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
            keys, values = (
                gather_pages(arena, pages, row, kv_heads, page_entries, width, fp8_scale)[0]
                for row in (key_row, value_row)
            )
            scores = jnp.einsum("kgtd,knd->kgtn", queries, keys, precision=lax.Precision.HIGHEST)
            if softcap is not None:
                scores = softcap * jnp.tanh(scores / softcap)
            positions = origin + block * block_tokens + jnp.arange(block_tokens, dtype=jnp.int32)
            seen = (positions[None, :] <= at[:, None]) & (positions[None, :] < end)
            if window is not None:
                seen &= positions[None, :] > at[:, None] - window
            # The barrier keeps the comparisons from being made again for every head. A row that has seen nothing yet
            # gets weights of 1, which the first key that it sees scales to zero.
            scores = jnp.where(lax.optimization_barrier(seen)[None, None], scores, MASKED)
            new_top = jnp.maximum(top, scores.max(-1))
            weights = jnp.exp(scores - new_top[..., None])
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

    out = lax.fori_loop(0, tiles.live_tiles, attend_tile, jnp.zeros_like(padded))
    return out[:tokens]
