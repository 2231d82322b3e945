"""Decode attention over the paged arena: one to eight query tokens a sequence, the last that it holds.

out[b, j, h] = sum_i softmax_i(cap(scale * q[b, j, h] . K[i])) V[i] over the positions i that sequence b holds, up to
query j's own, and that its window admits; a sink adds exp(sinks[h]) to the denominator. Arena layout as in `pages`.

Grid: (splits, kv_heads, B). A program packs the query heads of one KV head, for each query, into the rows of
tensor-core products (16 at least) and walks its share of the sequence's blocks with an online softmax; shares are cut
from the actual length, so programs past the end stop at once. With more than one live split the programs leave float32
partials and the last to arrive (an atomic count for each sequence and KV head) combines them, which saves a kernel a
layer.
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

from resin.pallas_kernels.gpu import H200, Gpu
from resin.pallas_kernels.online_softmax import Sums, add_block, finish, no_sums
from resin.pallas_kernels.pages import PagedSpec, load_block, paged_sizes
from resin.pallas_kernels.tiles import MIN_ROWS, NO_TOP, dot_pieces, plane_rows
from resin.plan import InvalidRequest

# Partials that the combine loads at once, and their values at most: 128 registers of each thread of 4 warps.
COMBINE_SPLITS, COMBINE_VALUES = 8, 16_384
MAX_QUERIES = 8  # of a sequence
MAX_ROWS = 128  # queries times heads of a KV head, beside a single query's


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """How the work is cut: tokens a block, most shares a sequence is cut into, warps and pipeline depth."""

    block_tokens: int = 64
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 5


def choose_decode_tiles(
    sequences: int, kv_heads: int, max_tokens: int, gpu: Gpu, *, rows: int = MIN_ROWS, width: int = 128
) -> DecodeTiles:
    """As many splits as fill the GPU twice, none shorter than a block.

    Measured on an H200 (32 query and 8 KV heads of 128, 16-token pages): blocks of 64 with 4 warps are within 2% of the
    best of nine tilings everywhere, and about 264 programs beat fewer and more. The deeper pipeline gains 8 to 13% at
    64 to 256 programs that walk many blocks each, loses 5% where a program has one block, and 4% once programs queue.

    Args:
        sequences: padded sequences B.
        kv_heads: KV heads on this device.
        max_tokens: longest sequence that the page rows can hold.
        gpu: what it runs on.
        rows: of a program's products.
        width: head size.
    """
    pairs, block = sequences * kv_heads, DecodeTiles().block_tokens
    splits = max(1, min(2 * gpu.cores // pairs, -(-max_tokens // block)))
    # Sums of 64 rows by 128 values are 64 registers of each thread of 4 warps, scores 32: more would spill.
    num_warps = 8 if rows * pl.next_power_of_2(width) >= 64 * 128 else 4
    return DecodeTiles(splits=splits, num_warps=num_warps, num_stages=5 if 32 <= pairs < 4 * gpu.cores else 3)


def paged_decode_attention(
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
    gpu: Gpu = H200,
    tiles: DecodeTiles | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Attention of a sequence's last tokens to its pages.

    Args:
        q: `[B, Q, H, D]`, H a multiple of kv_heads, Q at most 8.
        arena: `[num_pages, page_elements]` in q's dtype, or uint16 that holds bfloat16 bits.
        page_indptr: int32 `[B + 1]`, the pages of sequence b are `page_ids[page_indptr[b]:page_indptr[b + 1]]`.
        page_ids: int32 `[row_pages]`, chronological within a sequence.
        seq_lens: int32 `[B]`, tokens of the sequence, the queries' own included; 0 gives rows of zeros.
        first_position: int32 `[B]`, position of the first entry of the sequence's first page.
        key_row, value_row: int32 scalars, rows of D elements from a page's start to the layer's keys and values.
        kv_heads, page_entries: the layer's KV heads on this device, entries a page.
        scale: factor of q . k.
        window: positions that a query sees, its own included; None sees all.
        sinks: `[H]` logits that take part in the softmax and carry no value.
        softcap: scores become `softcap * tanh(score / softcap)`.
        fp8_scale: keys and values are e4m3, two to an element of a uint16 arena, times this; None for q's dtype. Rows
            are then of D / 2 elements.
        query_lens: int32 `[B]`, how many of a sequence's Q queries are its last tokens; the others give rows of zeros.
            None for all.
        with_lse: give the logarithms of the softmax's denominators, too.
        counters: int32 `[at least B * kv_heads]` zeros, given back as zeros: pass the result to the next layer's call,
            or None to have XLA clear new ones (one more kernel).
        gpu: what tiles are chosen for.
        tiles: overrides the choice of tiles.
        interpret: run the kernel body in Pallas' interpreter.

    Returns:
        `[B, Q, H, D]` in q's dtype, float32 `[B, Q, H]` or None, and the counters.

    Raises:
        InvalidRequest: more queries than one program can take.
    """
    sequences, queries, heads, width = q.shape
    rows = pl.next_power_of_2(queries * (heads // kv_heads))
    if queries > MAX_QUERIES or (queries > 1 and rows > MAX_ROWS):
        allowed = f"at most {MAX_QUERIES}, and {MAX_ROWS} with the {heads // kv_heads} heads of a KV head"
        raise InvalidRequest("queries", queries, allowed)
    if tiles is None:
        tokens = page_ids.shape[0] * page_entries
        tiles = choose_decode_tiles(sequences, kv_heads, tokens, gpu, rows=rows, width=width)
    spec = _Spec(
        **paged_sizes(arena, heads, width, kv_heads, scale, fp8_scale),
        page_entries=page_entries,
        window=window,
        has_sinks=sinks is not None,
        softcap=softcap,
        with_lse=with_lse,
        queries=queries,
        heads=heads,
        tiles=tiles,
        interpret=interpret,
    )
    if tiles.splits > 1 and counters is None:
        counters = jnp.zeros((sequences * kv_heads,), jnp.int32)
    operands = _Operands(
        q.reshape(sequences, queries * heads, width),
        arena.reshape(-1, spec.width),
        page_indptr,
        page_ids,
        seq_lens,
        first_position,
        plane_rows(key_row, value_row),
        query_lens if queries > 1 else None,
        sinks,
    )
    out, lse, used = _call(spec, operands, counters if tiles.splits > 1 else None)
    lse = None if lse is None else lse.reshape(q.shape[:3])
    return out.reshape(q.shape), lse, counters if used is None else used


class _Operands(NamedTuple):
    """Arrays of a call or, in the kernel, their references."""

    q: Any  # [B, Q * H, D]
    arena: Any  # [rows, elements]
    page_indptr: Any
    page_ids: Any
    seq_lens: Any
    first_position: Any
    planes: Any
    query_lens: Any
    sinks: Any


class _Results(NamedTuple):
    """What a call leaves, or references to it."""

    out: Any
    lse: Any = None
    partials: Any = None  # float32 [B, K, splits, group_rows, D]
    stats: Any = None  # float32 [B, K, splits, group_rows, 2]
    counters: Any = None


@functools.partial(jax.jit, static_argnums=0)
def _call(
    spec: _Spec, operands: _Operands, counters: jax.Array | None
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """The kernel call. Nested jit: the layers of a model trace and lower it once."""
    inputs, structure = jax.tree.flatten((operands, counters))
    sequences, vectors, width = operands.q.shape
    results = _Results(jax.ShapeDtypeStruct(operands.q.shape, operands.q.dtype))
    if spec.with_lse:
        results = results._replace(lse=jax.ShapeDtypeStruct((sequences, vectors), jnp.float32))
    if counters is not None:
        shares = (sequences, spec.kv_heads, spec.tiles.splits, spec.group_rows)
        results = results._replace(
            partials=jax.ShapeDtypeStruct((*shares, width), jnp.float32),
            stats=jax.ShapeDtypeStruct((*shares, 2), jnp.float32),
            counters=jax.ShapeDtypeStruct(counters.shape, jnp.int32),
        )
    outputs, left = jax.tree.flatten(results)
    outs = pl.pallas_call(
        functools.partial(_decode_kernel, spec=spec, structures=(structure, left)),
        grid=(spec.tiles.splits, spec.kv_heads, sequences),
        out_shape=outputs,
        input_output_aliases={} if counters is None else {len(inputs) - 1: len(outputs) - 1},
        compiler_params=plgpu.CompilerParams(num_warps=spec.tiles.num_warps, num_stages=spec.tiles.num_stages),
        interpret=spec.interpret,
        name="paged_decode",
    )(*inputs)
    results = jax.tree.unflatten(left, outs)
    return results.out, results.lse, results.counters


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spec(PagedSpec):
    queries: int
    heads: int
    tiles: DecodeTiles

    @property
    def kv_heads(self) -> int:
        return self.heads // self.group

    @property
    def group_rows(self) -> int:
        """Query vectors of a KV head, rounded up to a power of two."""
        return pl.next_power_of_2(self.queries * self.group)

    @property
    def rows(self) -> int:
        """Rows of the products."""
        return max(MIN_ROWS, self.group_rows)

    @property
    def combined_splits(self) -> int:
        """Partials that the combine loads at once, a power of two."""
        values = COMBINE_VALUES * self.tiles.num_warps // 4
        return max(1, min(COMBINE_SPLITS, values // (self.group_rows * self.columns * self.pieces)))

    def vectors(self, head: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What rows of a program are, query by query: query vectors of the sequence, their heads, which are real."""
        real = rows < self.queries * self.group
        if self.queries == 1:
            heads = head * self.group + rows
            return heads, heads, real
        heads = head * self.group + rows % self.group
        return rows // self.group * self.heads + heads, heads, real


class _Walk(NamedTuple):
    """What a program reads of its sequence. Entries count from the sequence's first page."""

    head: jax.Array  # KV head
    row_first: jax.Array  # the sequence's first page row
    start: jax.Array | int  # the first block's first entry
    end: jax.Array  # the first query sees entries before it
    entries: jax.Array  # the last query sees entries before it
    standing: jax.Array | None  # [rows], the entry that each row stands at; None where all are one query's


def _decode_kernel(*refs, spec: _Spec, structures):
    structure, left = structures
    # With splits the counters come as an input too, aliased to the last output.
    operands = jax.tree.unflatten(structure, refs[: structure.num_leaves])[0]
    results = jax.tree.unflatten(left, refs[structure.num_leaves :])
    split, head, sequence = (pl.program_id(axis) for axis in range(3))
    rows = jnp.arange(spec.rows, dtype=jnp.int32)
    walk = _plan_walk(operands, sequence, head, rows, spec)
    blocks = pl.cdiv(walk.entries - walk.start, spec.tiles.block_tokens)
    share = pl.cdiv(blocks, spec.tiles.splits)
    live = jnp.maximum(pl.cdiv(blocks, jnp.maximum(share, 1)), 1)

    @pl.when(split < live)
    def _():
        lanes = jnp.arange(spec.columns, dtype=jnp.int32)
        vectors, _, real = spec.vectors(head, rows)
        inside = real[:, None] & (lanes < spec.width)[None, :]
        q = tuple(
            plgpu.load(operands.q.at[sequence, vectors[:, None], spec.lanes(piece)[None, :]], mask=inside, other=0)
            for piece in range(spec.pieces)
        )
        attend = functools.partial(_attend_block, operands, q, walk, spec)
        first_block = split * share
        sums = lax.fori_loop(first_block, jnp.minimum(first_block + share, blocks), attend, no_sums(spec.rows, spec))
        if spec.tiles.splits == 1:
            _store(operands, results, sequence, head, sums, spec)
        else:
            _leave_and_combine(operands, results, sequence, head, split, live, sums, spec)


def _plan_walk(operands: _Operands, sequence, head, rows, spec: _Spec) -> _Walk:
    """Where the sequence's keys begin and end, and where its queries stand."""
    origin = operands.first_position[sequence]
    entries = end = jnp.maximum(operands.seq_lens[sequence] - origin, 0)
    standing = None
    if spec.queries > 1:
        queries = spec.queries if operands.query_lens is None else operands.query_lens[sequence]
        end = operands.seq_lens[sequence] - origin - queries + 1
        query = rows // spec.group
        standing = jnp.where(query < queries, end - 1 + query, -1)
    start: jax.Array | int = 0
    if spec.window is not None:
        start = jnp.maximum(end - spec.window, 0) // spec.tiles.block_tokens * spec.tiles.block_tokens
    return _Walk(head, operands.page_indptr[sequence], start, end, entries, standing)


def _attend_block(operands: _Operands, q, walk: _Walk, spec: _Spec, index, sums: Sums) -> Sums:
    """One block of the online softmax: entries `start + index * block ...` of the sequence."""
    lanes = jnp.arange(spec.columns, dtype=jnp.int32)
    entry = walk.start + index * spec.tiles.block_tokens + jnp.arange(spec.tiles.block_tokens, dtype=jnp.int32)
    held = entry < walk.entries
    pages = plgpu.load(operands.page_ids.at[walk.row_first + entry // spec.page_entries], mask=held, other=0)
    inside = held[:, None] & (lanes < spec.width)[None, :]
    keys, values = load_block(operands.arena, pages, entry, walk.head, inside, operands.planes, q[0].dtype, spec)
    if walk.standing is not None:
        seen = entry[None, :] <= walk.standing[:, None]
        if spec.window is not None:
            seen &= entry[None, :] > walk.standing[:, None] - spec.window
    else:
        oldest = jnp.maximum(walk.end - spec.window, 0) if spec.window is not None else None
        seen = (held if oldest is None else held & (entry >= oldest))[None, :]
    return add_block(sums, dot_pieces(q, keys), seen, values, spec)


def _store(operands: _Operands, results: _Results, sequence, head, sums: Sums, spec: _Spec) -> None:
    """Writes the results of one KV head's query vectors."""
    rows = jnp.arange(sums.total.shape[0], dtype=jnp.int32)
    lanes = jnp.arange(spec.columns, dtype=jnp.int32)
    vectors, heads, real = spec.vectors(head, rows)
    sinks = None
    if operands.sinks is not None:
        sinks = plgpu.load(operands.sinks.at[heads], mask=real, other=0).astype(jnp.float32)
    out, lse = finish(sums, sinks, spec)
    inside = real[:, None] & (lanes < spec.width)[None, :]
    for piece, part in enumerate(out):
        place = (sequence, vectors[:, None], spec.lanes(piece)[None, :])
        plgpu.store(results.out.at[place], part.astype(results.out.dtype), mask=inside)
    if lse is not None:
        plgpu.store(results.lse.at[sequence, vectors], lse, mask=real)


def _leave_and_combine(
    operands: _Operands, results: _Results, sequence, head, split, live, sums: Sums, spec: _Spec
) -> None:
    """Leaves this split's sums in the partial buffers; the last of `live` splits to arrive combines them all."""
    rows = jnp.arange(spec.rows, dtype=jnp.int32)
    lanes = jnp.arange(spec.columns, dtype=jnp.int32)
    real = rows < spec.group_rows
    inside = real[:, None] & (lanes < spec.width)[None, :]
    for piece, part in enumerate(sums.out):
        place = (sequence, head, split, rows[:, None], spec.lanes(piece)[None, :])
        plgpu.store(results.partials.at[place], part, mask=inside)
    plgpu.store(results.stats.at[sequence, head, split, rows, 0], sums.top, mask=real)
    plgpu.store(results.stats.at[sequence, head, split, rows, 1], sums.total, mask=real)
    if not spec.interpret:
        plgpu.debug_barrier()  # every thread's partials come before the count
    place = sequence * pl.num_programs(1) + head
    one = jnp.minimum(live, 1)  # a traced 1: the interpreter takes no constant here
    arrived = plgpu.atomic_add(results.counters, (place,), one)

    @pl.when(arrived == live - 1)
    def _():
        combine = functools.partial(_combine_splits, results, sequence, head, live, spec)
        steps = pl.cdiv(live, spec.combined_splits)
        _store(
            operands, results, sequence, head, lax.fori_loop(0, steps, combine, no_sums(spec.group_rows, spec)), spec
        )
        results.counters[place] = 0


def _combine_splits(results: _Results, sequence, head, live, spec: _Spec, index, sums: Sums) -> Sums:
    split = index * spec.combined_splits + jnp.arange(spec.combined_splits, dtype=jnp.int32)
    rows = jnp.arange(spec.group_rows, dtype=jnp.int32)
    lanes = jnp.arange(spec.columns, dtype=jnp.int32)
    held = (split < live)[:, None] & (rows >= 0)[None, :]
    tops, totals = (
        plgpu.load(results.stats.at[sequence, head, split[:, None], rows[None, :], field], mask=held, other=other)
        for field, other in ((0, NO_TOP), (1, 0.0))
    )
    inside = held[:, :, None] & (lanes < spec.width)[None, None, :]
    at = (sequence, head, split[:, None, None], rows[None, :, None])
    outs = [
        plgpu.load(results.partials.at[(*at, spec.lanes(piece)[None, None, :])], mask=inside, other=0.0)
        for piece in range(spec.pieces)
    ]
    top = jnp.maximum(sums.top, jnp.max(tops, axis=0))
    weights = jnp.exp2(tops - top[None, :])
    keep = jnp.exp2(sums.top - top)
    total = sums.total * keep + jnp.sum(totals * weights, axis=0)
    out = tuple(
        part * keep[:, None] + jnp.sum(share * weights[:, :, None], axis=0)
        for part, share in zip(sums.out, outs, strict=True)
    )
    return Sums(top, total, out)
