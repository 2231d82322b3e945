"""Decode attention over the paged arena: one query token a sequence.

out[b, h] = sum_j softmax_j(cap(scale * q[b, h] . K[j])) V[j] over the positions j that sequence b holds and its
window admits; a sink adds exp(sinks[h]) to the denominator.

Arena layout: `[num_pages, page_elements]`. A layer's keys are `[kv_heads, page_entries, head_dim]`, `key_row` rows of
head_dim elements after the start of a page; its values likewise at `value_row`. Rows are addressed as
`page * (page_elements / head_dim) + row`, which stays below 2^31 where element indices do not. Both offsets are
operands, not constants, so that all layers of a model share one compiled kernel. Vectors of 8-bit floats take half the
elements and come in two pieces (`fp8`): scores are the sum of two products, and sums of values are two tiles.

Grid: (splits, kv_heads, B). A program packs the query heads of one KV head into the 16 rows that a tensor-core
product needs and walks its share of the sequence's blocks with an online softmax; shares are cut from the actual
length, so programs past the end stop at once. With more than one live split the programs leave float32 partials and
the last to arrive (an atomic count for each sequence and KV head) combines them, which saves a kernel a layer.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from resin.pallas_kernels.fp8 import check_kernel_arena, row_elements, unpack_fp8
from resin.pallas_kernels.tiles import (
    LOG2E,
    MASKED,
    MIN_ROWS,
    NO_TOP,
    dot_pieces,
    exp2_affine,
    load_rows,
    piece_lanes,
    plane_rows,
    tile_dot,
)

# Tokens of one sequence and of all sequences that the reference handles at once: enough for the matrix routines of a
# CPU, few enough that short rows beside a long one waste little (16 sequences: 64 tokens beat 128 by a third).
REFERENCE_BLOCK_TOKENS = 128
REFERENCE_BATCH_TOKENS = 1024

COMBINE_SPLITS = 8  # partials that the combine loads at once: 8 x 4 x 128 floats are 32 registers a thread


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """How the work is cut: tokens a block, most shares a sequence is cut into, warps and pipeline depth."""

    block_tokens: int = 64
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 5


def choose_decode_tiles(sequences: int, kv_heads: int, max_tokens: int, cores: int) -> DecodeTiles:
    """As many splits as fill the GPU twice, none shorter than a block.

    Measured on an H200 (32 query and 8 KV heads of 128, 16-token pages): blocks of 64 with 4 warps are within 2% of the
    best of nine tilings everywhere, and about 264 programs beat fewer and more. The deeper pipeline gains 8 to 13% at
    64 to 256 programs that walk many blocks each, loses 5% where a program has one block, and 4% once programs queue.

    Args:
        sequences: padded sequences B.
        kv_heads: KV heads on this device.
        max_tokens: longest sequence that the page rows can hold.
        cores: multiprocessors of the GPU.
    """
    pairs, block = sequences * kv_heads, DecodeTiles().block_tokens
    splits = max(1, min(2 * cores // pairs, -(-max_tokens // block)))
    return DecodeTiles(splits=splits, num_stages=5 if 32 <= pairs < 4 * cores else 3)


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
    counters: jax.Array | None = None,
    cores: int = 132,
    tiles: DecodeTiles | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Attention of one query token a sequence to the sequence's pages.

    Args:
        q: `[B, H, D]`, H a multiple of kv_heads.
        arena: `[num_pages, page_elements]` in q's dtype, or uint16 that holds bfloat16 bits.
        page_indptr: int32 `[B + 1]`, the pages of sequence b are `page_ids[page_indptr[b]:page_indptr[b + 1]]`.
        page_ids: int32 `[row_pages]`, chronological within a sequence.
        seq_lens: int32 `[B]`, tokens of the sequence, the query's own included; 0 gives a row of zeros.
        first_position: int32 `[B]`, position of the first entry of the sequence's first page.
        key_row, value_row: int32 scalars, rows of D elements from a page's start to the layer's keys and values.
        kv_heads, page_entries: the layer's KV heads on this device, entries a page.
        scale: factor of q . k.
        window: positions that a query sees, its own included; None sees all.
        sinks: float32 `[H]` logits that take part in the softmax and carry no value.
        softcap: scores become `softcap * tanh(score / softcap)`.
        fp8_scale: keys and values are e4m3, two to an element of a uint16 arena, times this; None for q's dtype. Rows
            are then of D / 2 elements.
        counters: int32 `[at least B * kv_heads]` zeros, given back as zeros: pass the result to the next layer's call,
            or None to have XLA clear new ones (one more kernel).
        cores: multiprocessors of the GPU, which the number of splits follows.
        tiles: overrides the choice of tiles.
        interpret: run the kernel body in Pallas' interpreter.

    Returns:
        `[B, H, D]` in q's dtype, and the counters.
    """
    sequences, heads, width = q.shape
    if tiles is None:
        tiles = choose_decode_tiles(sequences, kv_heads, page_ids.shape[0] * page_entries, cores)
    check_kernel_arena(arena.dtype, fp8_scale)
    elements = row_elements(width, arena.dtype, fp8_scale)
    spec = _Spec(
        group=heads // kv_heads,
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
    planes = plane_rows(key_row, value_row)
    if tiles.splits > 1 and counters is None:
        counters = jnp.zeros((sequences * kv_heads,), jnp.int32)
    out, used = _call(
        spec,
        (q, arena.reshape(-1, elements), page_indptr, page_ids, seq_lens, first_position, planes),
        None if sinks is None else sinks.astype(jnp.float32),
        counters if tiles.splits > 1 else None,
    )
    return out, counters if used is None else used


@functools.partial(jax.jit, static_argnums=0)
def _call(spec: _Spec, operands: tuple[jax.Array, ...], sinks: jax.Array | None, counters: jax.Array | None):
    """The kernel call. Nested jit: the layers of a model trace and lower it once."""
    sequences, heads, width = operands[0].shape
    kv_heads, splits = heads // spec.group, spec.tiles.splits
    inputs = [*operands, *([] if sinks is None else [sinks]), *([] if counters is None else [counters])]
    outputs = [jax.ShapeDtypeStruct(operands[0].shape, operands[0].dtype)]
    if counters is not None:
        shares = (sequences, kv_heads, splits, spec.group_rows)
        outputs += [
            jax.ShapeDtypeStruct((*shares, width), jnp.float32),
            jax.ShapeDtypeStruct((*shares, 2), jnp.float32),
            jax.ShapeDtypeStruct(counters.shape, jnp.int32),
        ]
    results = pl.pallas_call(
        functools.partial(_decode_kernel, spec=spec),
        grid=(splits, kv_heads, sequences),
        out_shape=outputs,
        input_output_aliases={} if counters is None else {len(inputs) - 1: 3},
        compiler_params=plgpu.CompilerParams(num_warps=spec.tiles.num_warps, num_stages=spec.tiles.num_stages),
        interpret=spec.interpret,
        name="paged_decode",
    )(*inputs)
    return results[0], None if counters is None else results[-1]


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
    tiles: DecodeTiles
    interpret: bool

    @property
    def group_rows(self) -> int:
        """Query heads of a KV head, rounded up to a power of two."""
        return pl.next_power_of_2(self.group)

    @property
    def rows(self) -> int:
        """Rows of the products."""
        return max(MIN_ROWS, self.group_rows)

    @property
    def columns(self) -> int:
        """Width of a piece, rounded up to a power of two."""
        return pl.next_power_of_2(self.width)

    def lanes(self, piece: int) -> jax.Array:
        """Columns of q, of the result and of partial sums that belong to a piece."""
        return piece_lanes(piece, self.width, jnp.arange(self.columns, dtype=jnp.int32))


def _decode_kernel(q_ref, arena_ref, indptr_ref, ids_ref, lens_ref, first_ref, planes_ref, *refs, spec: _Spec):
    sinks_ref = refs[0] if spec.has_sinks else None
    # With splits the counters come as an input too, aliased to the last output.
    outputs = refs[spec.has_sinks + (spec.tiles.splits > 1) :]
    block = spec.tiles.block_tokens
    split, head, sequence = (pl.program_id(axis) for axis in range(3))
    origin = first_ref[sequence]
    entries = jnp.maximum(lens_ref[sequence] - origin, 0)
    oldest = jnp.maximum(entries - spec.window, 0) if spec.window is not None else 0
    start = oldest // block * block if spec.window is not None else 0
    blocks = pl.cdiv(entries - start, block)
    share = pl.cdiv(blocks, spec.tiles.splits)
    live = jnp.maximum(pl.cdiv(blocks, jnp.maximum(share, 1)), 1)

    @pl.when(split < live)
    def _():
        lanes = jnp.arange(spec.columns, dtype=jnp.int32)
        rows = jnp.arange(spec.rows, dtype=jnp.int32)
        inside = (rows < spec.group)[:, None] & (lanes < spec.width)[None, :]
        heads = head * spec.group + rows
        q = tuple(
            plgpu.load(q_ref.at[sequence, heads[:, None], spec.lanes(piece)[None, :]], mask=inside, other=0)
            for piece in range(spec.pieces)
        )
        walk = functools.partial(
            _attend_block, q, arena_ref, ids_ref, indptr_ref[sequence], planes_ref, head, start, oldest, entries, spec
        )
        top = jnp.full((spec.rows,), NO_TOP, jnp.float32)
        total = jnp.zeros((spec.rows,), jnp.float32)
        out = (jnp.zeros((spec.rows, spec.columns), jnp.float32),) * spec.pieces
        first_block = split * share
        top, total, out = lax.fori_loop(first_block, jnp.minimum(first_block + share, blocks), walk, (top, total, out))
        if spec.tiles.splits == 1:
            _store(outputs[0], sinks_ref, sequence, head, top, total, out, spec)
        else:
            _leave_and_combine(outputs, sinks_ref, sequence, head, split, live, top, total, out, spec)


def _attend_block(
    q, arena_ref, ids_ref, row_first, planes_ref, head, start, oldest, entries, spec: _Spec, index, carry
):
    """One block of the online softmax: entries `start + index * block ...` of the sequence."""
    top, total, out = carry
    lanes = jnp.arange(spec.columns, dtype=jnp.int32)
    entry = start + index * spec.tiles.block_tokens + jnp.arange(spec.tiles.block_tokens, dtype=jnp.int32)
    held = entry < entries
    pages = plgpu.load(ids_ref.at[row_first + entry // spec.page_entries], mask=held, other=0)
    rows = pages * spec.rows_per_page + head * spec.page_entries + entry % spec.page_entries
    inside = held[:, None] & (lanes < spec.width)[None, :]
    keys, values = (
        load_rows(arena_ref, rows + planes_ref[plane], lanes, inside, q[0].dtype, spec.pieces > 1) for plane in (0, 1)
    )
    scores = dot_pieces(q, keys)
    factor = spec.scale * LOG2E
    if spec.softcap is not None:
        scores = jnp.tanh(scores * (spec.scale / spec.softcap))
        factor = spec.softcap * LOG2E
    seen = held if spec.window is None else held & (entry >= oldest)
    scores = jnp.where(seen[None, :], scores, MASKED)
    new_top = jnp.maximum(top, jnp.max(scores, axis=1) * factor)
    weights = exp2_affine(scores, factor, new_top[:, None], interpret=spec.interpret)
    keep = exp2_affine(top, 1.0, new_top, interpret=spec.interpret)
    total = total * keep + jnp.sum(weights, axis=1)
    out = tuple(
        part * keep[:, None] + tile_dot(weights.astype(q[0].dtype), value)
        for part, value in zip(out, values, strict=True)
    )
    return new_top, total, out


def _store(out_ref, sinks_ref, sequence, head, top, total, out, spec: _Spec) -> None:
    """Normalises `[rows, columns]` sums of one KV head and writes its query heads; no entries give zeros."""
    rows = jnp.arange(total.shape[0], dtype=jnp.int32)
    lanes = jnp.arange(spec.columns, dtype=jnp.int32)
    heads = head * spec.group + rows
    if sinks_ref is not None:
        sinks = plgpu.load(sinks_ref.at[heads], mask=rows < spec.group, other=0.0)
        total = total + jnp.exp2(sinks * LOG2E - top)
    out = tuple(part / jnp.where(total > 0, total, 1.0)[:, None] for part in out)
    if spec.value_scale != 1.0:
        out = tuple(part * spec.value_scale for part in out)
    inside = (rows < spec.group)[:, None] & (lanes < spec.width)[None, :]
    for piece, part in enumerate(out):
        place = (sequence, heads[:, None], spec.lanes(piece)[None, :])
        plgpu.store(out_ref.at[place], part.astype(out_ref.dtype), mask=inside)


def _leave_and_combine(outputs, sinks_ref, sequence, head, split, live, top, total, out, spec: _Spec) -> None:
    """Leaves this split's sums in the partial buffers; the last of `live` splits to arrive combines them all."""
    out_ref, partial_ref, stats_ref, counter_ref = outputs
    rows = jnp.arange(spec.rows, dtype=jnp.int32)
    lanes = jnp.arange(spec.columns, dtype=jnp.int32)
    real = rows < spec.group_rows
    inside = real[:, None] & (lanes < spec.width)[None, :]
    for piece, part in enumerate(out):
        place = (sequence, head, split, rows[:, None], spec.lanes(piece)[None, :])
        plgpu.store(partial_ref.at[place], part, mask=inside)
    plgpu.store(stats_ref.at[sequence, head, split, rows, 0], top, mask=real)
    plgpu.store(stats_ref.at[sequence, head, split, rows, 1], total, mask=real)
    if not spec.interpret:
        plgpu.debug_barrier()  # every thread's partials come before the count
    place = sequence * pl.num_programs(1) + head
    one = jnp.minimum(live, 1)  # a traced 1: the interpreter takes no constant here
    arrived = plgpu.atomic_add(counter_ref, (place,), one)

    @pl.when(arrived == live - 1)
    def _():
        combine = functools.partial(_combine_splits, partial_ref, stats_ref, sequence, head, live, spec)
        top = jnp.full((spec.group_rows,), NO_TOP, jnp.float32)
        total = jnp.zeros((spec.group_rows,), jnp.float32)
        out = (jnp.zeros((spec.group_rows, spec.columns), jnp.float32),) * spec.pieces
        top, total, out = lax.fori_loop(0, pl.cdiv(live, COMBINE_SPLITS), combine, (top, total, out))
        _store(out_ref, sinks_ref, sequence, head, top, total, out, spec)
        counter_ref[place] = 0


def _combine_splits(partial_ref, stats_ref, sequence, head, live, spec: _Spec, index, carry):
    top, total, out = carry
    split = index * COMBINE_SPLITS + jnp.arange(COMBINE_SPLITS, dtype=jnp.int32)
    rows = jnp.arange(spec.group_rows, dtype=jnp.int32)
    lanes = jnp.arange(spec.columns, dtype=jnp.int32)
    held = (split < live)[:, None] & (rows >= 0)[None, :]
    tops, totals = (
        plgpu.load(stats_ref.at[sequence, head, split[:, None], rows[None, :], field], mask=held, other=other)
        for field, other in ((0, NO_TOP), (1, 0.0))
    )
    inside = held[:, :, None] & (lanes < spec.width)[None, None, :]
    at = (sequence, head, split[:, None, None], rows[None, :, None])
    outs = [
        plgpu.load(partial_ref.at[(*at, spec.lanes(piece)[None, None, :])], mask=inside, other=0.0)
        for piece in range(spec.pieces)
    ]
    new_top = jnp.maximum(top, jnp.max(tops, axis=0))
    weights = jnp.exp2(tops - new_top[None, :])
    keep = jnp.exp2(top - new_top)
    total = total * keep + jnp.sum(totals * weights, axis=0)
    out = tuple(
        part * keep[:, None] + jnp.sum(share * weights[:, :, None], axis=0)
        for part, share in zip(out, outs, strict=True)
    )
    return new_top, total, out


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
    counters: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """The same function in plain XLA, float32 inside; the product path on CPU.

    Loops over blocks of pages with a dynamic trip count and an online softmax, so one executable serves every length.
    Arguments and result as in `paged_decode_attention`.
    """
    sequences, heads, width = q.shape
    group = heads // kv_heads
    block_pages = max(1, min(REFERENCE_BLOCK_TOKENS, REFERENCE_BATCH_TOKENS // sequences) // page_entries)
    block_tokens = block_pages * page_entries
    queries = q.astype(jnp.float32).reshape(sequences, kv_heads, group, width) * scale
    last = seq_lens - 1
    first = jnp.maximum(first_position, seq_lens - window) if window is not None else first_position

    def attend_block(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, out = carry
        columns = page_indptr[:-1, None] + index * block_pages + jnp.arange(block_pages, dtype=jnp.int32)[None, :]
        pages = page_ids.at[jnp.minimum(columns, page_indptr[1:, None] - 1)].get(mode="clip")
        keys, values = (
            gather_pages(arena, pages, row, kv_heads, page_entries, width, fp8_scale) for row in (key_row, value_row)
        )
        scores = jnp.einsum("bkgd,bknd->bkgn", queries, keys, precision=lax.Precision.HIGHEST)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        block_positions = index * block_tokens + jnp.arange(block_tokens, dtype=jnp.int32)
        positions = first_position[:, None] + block_positions[None, :]
        seen = (positions >= first[:, None]) & (positions <= last[:, None])
        scores = jnp.where(seen[:, None, None], scores, MASKED)
        new_top = jnp.maximum(top, scores.max(-1))
        # A row that has seen nothing yet gets weights of 1, which the first key that it sees scales to zero.
        weights = jnp.exp(scores - new_top[..., None])
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
        total = total + jnp.exp(sinks.astype(jnp.float32).reshape(1, kv_heads, group) - top)
    out = out / jnp.where(total > 0, total, 1.0)[..., None]
    return out.reshape(sequences, heads, width).astype(q.dtype), counters


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
