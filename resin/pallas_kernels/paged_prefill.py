"""Ragged causal prefill attention over the paged arena: many sequences packed, each a chunk after a cached prefix.

Token t of sequence b (`query_indptr[b] <= t < query_indptr[b + 1]`) stands at position
`seq_lens[b] - (query_indptr[b + 1] - t)` and attends to the positions up to its own that its window admits, all of
which lie in the arena already (the chunk's own keys were appended before). Arena layout as in `pages`.

Work is cut into query tiles, each within one sequence; `tile_map` computes them from `query_indptr`. Grid:
(tiles, kv_heads), the last tiles of the batch first because causal tiles grow towards the end. The rows of a tile
are (token, query head of the KV head) pairs, so that all heads of a group share every load of keys and values, which
is also one contiguous piece of q. Blocks that every row sees whole run without masks, before those on an edge.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from resin.pallas_kernels.online_softmax import Sums, add_block, finish, no_sums
from resin.pallas_kernels.pages import PagedSpec, load_block, paged_sizes
from resin.pallas_kernels.tiles import dot_pieces, plane_rows


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
    with_lse: bool = False,
    tiles: PrefillTiles | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
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
        sinks: `[H]` logits that take part in the softmax and carry no value.
        softcap: scores become `softcap * tanh(score / softcap)`.
        fp8_scale: as in `paged_decode`.
        with_lse: give the logarithms of the softmax's denominators, too.
        tiles: overrides the choice of tiles.
        interpret: run the kernel body in Pallas' interpreter.

    Returns:
        `[T, H, D]` in q's dtype, and float32 `[T, H]` or None; rows of tokens that belong to no sequence are undefined.
    """
    tokens, heads, width = q.shape
    group = heads // kv_heads
    if tiles is None:
        tiles = choose_prefill_tiles(tokens, group, width)
    spec = _Spec(
        **paged_sizes(arena, heads, width, kv_heads, scale, fp8_scale),
        page_entries=page_entries,
        window=window,
        has_sinks=sinks is not None,
        softcap=softcap,
        with_lse=with_lse,
        tiles=tiles,
        interpret=interpret,
    )
    operands = _Operands(
        q,
        arena.reshape(-1, spec.width),
        page_indptr,
        page_ids,
        query_indptr,
        seq_lens,
        first_position,
        plane_rows(key_row, value_row),
        tile_map(query_indptr, tokens, spec.tile_tokens),
        sinks,
    )
    out, *lse = _call(spec, operands)
    return out, lse[0] if with_lse else None


class _Operands(NamedTuple):
    """Arrays of a call or, in the kernel, their references."""

    q: Any
    arena: Any  # [rows, elements]
    page_indptr: Any
    page_ids: Any
    query_indptr: Any
    seq_lens: Any
    first_position: Any
    planes: Any
    tiles: TileMap
    sinks: Any


@functools.partial(jax.jit, static_argnums=0)
def _call(spec: _Spec, operands: _Operands) -> list[jax.Array]:
    """The kernel call. Nested jit: the layers of a model trace and lower it once."""
    inputs, structure = jax.tree.flatten(operands)
    q = operands.q
    outs: list[jax.Array] = pl.pallas_call(
        functools.partial(_prefill_kernel, spec=spec, structure=structure),
        grid=(operands.tiles.start.shape[0], q.shape[1] // spec.group),
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            *([jax.ShapeDtypeStruct(q.shape[:2], jnp.float32)] if spec.with_lse else []),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=spec.tiles.num_warps, num_stages=spec.tiles.num_stages),
        interpret=spec.interpret,
        name="paged_prefill",
    )(*inputs)
    return outs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spec(PagedSpec):
    tiles: PrefillTiles

    @property
    def tile_tokens(self) -> int:
        """Tokens of a query tile."""
        return self.tiles.rows // self.group

    @property
    def part_rows(self) -> int:
        return self.tiles.rows // self.tiles.parts


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


def _prefill_kernel(*refs, spec: _Spec, structure):
    operands = jax.tree.unflatten(structure, refs[: structure.num_leaves])
    out_ref, *lse_refs = refs[structure.num_leaves :]
    place, head = pl.num_programs(0) - 1 - pl.program_id(0), pl.program_id(1)

    @pl.when(place < operands.tiles.live_tiles[0])
    def _():
        sequence, start = operands.tiles.sequence[place], operands.tiles.start[place]
        query_end = operands.query_indptr[sequence + 1]
        # Token t stands at entry t + shift.
        shift = operands.seq_lens[sequence] - query_end - operands.first_position[sequence]
        lanes = jnp.arange(spec.columns, dtype=jnp.int32)
        parts = []
        for index in range(spec.tiles.parts):
            rows = index * spec.part_rows + jnp.arange(spec.part_rows, dtype=jnp.int32)
            token, heads = start + rows // spec.group, head * spec.group + rows % spec.group
            live = (rows < spec.tile_tokens * spec.group) & (token < query_end)
            inside = live[:, None] & (lanes < spec.width)[None, :]
            q = tuple(
                plgpu.load(
                    operands.q.at[token[:, None], heads[:, None], spec.lanes(piece)[None, :]], mask=inside, other=0
                )
                for piece in range(spec.pieces)
            )
            parts.append(_Part(token, heads, live, token + shift, q))
        entries = jnp.minimum(start + spec.tile_tokens, query_end) + shift
        tile = _Tile(operands.page_indptr[sequence], head, start + shift, entries)
        for part, sums in zip(parts, _attend(operands, tile, parts, spec), strict=True):
            sinks = None
            if operands.sinks is not None:
                sinks = plgpu.load(operands.sinks.at[part.heads], mask=part.live, other=0).astype(jnp.float32)
            out, lse = finish(sums, sinks, spec)
            inside = part.live[:, None] & (lanes < spec.width)[None, :]
            for piece, tile_out in enumerate(out):
                at = (part.token[:, None], part.heads[:, None], spec.lanes(piece)[None, :])
                plgpu.store(out_ref.at[at], tile_out.astype(out_ref.dtype), mask=inside)
            if lse is not None:
                plgpu.store(lse_refs[0].at[part.token, part.heads], lse, mask=part.live)


def _attend(operands: _Operands, tile: _Tile, parts: list[_Part], spec: _Spec) -> list[Sums]:
    """The online softmax over all blocks that the tile sees, for each part."""
    block = spec.tiles.block_tokens
    sums = [no_sums(spec.part_rows, spec) for _ in parts]
    walk = functools.partial(_attend_block, operands, tile, parts, spec)
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

    def walk_edge(index, sums):
        return walk(True, jnp.where(index < low_edge, begin + index, whole_end + index - low_edge), sums)

    # Edges first: with the whole blocks first, ptxas serialises every wgmma of the kernel (C7515).
    sums = lax.fori_loop(0, low_edge + end - whole_end, walk_edge, sums)
    return lax.fori_loop(inner, whole_end, functools.partial(walk, False), sums)


def _attend_block(operands: _Operands, tile: _Tile, parts, spec: _Spec, edge: bool, index, sums) -> list[Sums]:
    """One block of the online softmax; `edge` blocks hold entries that some row must not see."""
    lanes = jnp.arange(spec.columns, dtype=jnp.int32)
    entry = index * spec.tiles.block_tokens + jnp.arange(spec.tiles.block_tokens, dtype=jnp.int32)
    held = entry < tile.entries
    pages = plgpu.load(
        operands.page_ids.at[tile.row_first + entry // spec.page_entries],
        mask=held if edge else None,
        other=0 if edge else None,
    )
    inside = None
    if edge or spec.columns != spec.width:
        inside = (lanes < spec.width)[None, :] & (held[:, None] if edge else (entry >= 0)[:, None])
    dtype = parts[0].q[0].dtype
    keys, values = load_block(operands.arena, pages, entry, tile.head, inside, operands.planes, dtype, spec)
    scores = [dot_pieces(part.q, keys) for part in parts]
    return [
        add_block(each, score, _seen(part, entry, spec) if edge else None, values, spec)
        for part, score, each in zip(parts, scores, sums, strict=True)
    ]


def _seen(part: _Part, entry: jax.Array, spec: _Spec) -> jax.Array:
    """Which entries each row of a part sees."""
    seen = entry[None, :] <= part.entry[:, None]
    if spec.window is not None:
        seen &= entry[None, :] > part.entry[:, None] - spec.window
    return seen


class TileMap(NamedTuple):
    """Query tiles in token order; entries past `live_tiles` are padding with `sequence` = number of sequences."""

    live_tiles: jax.Array  # int32 [1]
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
    return TileMap(ends[-1:], sequence, query_indptr[held] + (index - first_tile) * tile_tokens)
