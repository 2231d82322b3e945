"""Products of few tokens with MXFP4 experts: a tensor core's operand goes from memory to registers and stays there.

`out[r] = matrix_e x[r] + bias_e`, gated or not, for rows r that lie sorted by expert e.

`mma.sync` multiplies 16 rows of a matrix by 8 tokens. Codes are stored in the order that it wants them (`mxfp4.py`),
become bfloat16 in registers and never touch shared memory: byte tiles, float32 FMA or dots through shared memory
reached 1.0 to 1.7 TB/s of packed bytes on an H200 where this reaches 2.9.

Grid (blocks of row tiles, slots): a slot is one expert that some token chose. A program's warps deal the quads of
groups of 64 columns among themselves, each asks for its next quad before it multiplies this one, and their sums meet at
the end. Within a warp each decoded tile serves up to `column_tiles` times 8 tokens.
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

from resin.pallas_kernels.gates import Gate
from resin.pallas_kernels.mxfp4 import (
    LANE_WORDS,
    QUAD,
    QUAD_COLUMNS,
    QUAD_FACTORS,
    TILE_COLUMNS,
    TILE_ROWS,
    TILE_WORDS,
    PackedMatrices,
    decode_register,
    multiply_fragments,
)
from resin.pallas_kernels.tiles import NOWHERE

TOKENS = 8  # columns of one product


@dataclass(frozen=True, slots=True)
class FragmentTiles:
    """How the work is cut.

    Attributes:
        row_tiles: tiles of 16 rows a program.
        warps: that share a tile's columns.
    """

    row_tiles: int
    warps: int


class SortedRows(NamedTuple):
    """Rows by expert: `x[start[s]:end[s]]` are those of `expert[s]`; slots past the chosen experts are empty."""

    x: Any  # bfloat16 [P, K], or [1, K] where all pairs share one row
    expert: Any  # int32 [min(P, E)]
    start: Any
    end: Any
    place: Any  # int32 [P], each pair's row


class _Operands(NamedTuple):
    """Arrays of a call or, in the kernel, their references."""

    x: Any  # int32 [rows * K / 2], two bfloat16 each
    matrices: Any  # words and factors flat
    expert: Any
    start: Any
    end: Any
    bias: Any
    factor: Any


@dataclass(frozen=True, slots=True)
class _Spec:
    """Everything static about one call."""

    pairs: int
    inner: int
    rows: int  # of a matrix
    is_shared: bool  # one row of x for all pairs
    gate: Gate | None
    column_tiles: int
    tiles: FragmentTiles
    interpret: bool

    @property
    def columns(self) -> int:
        """Of the result: gate and up make one."""
        return self.rows // 2 if self.gate else self.rows


def sort_rows(
    x: jax.Array, ids: jax.Array, experts: int, factor: jax.Array | None = None, *, interpret: bool = False
) -> SortedRows:
    """Copies each pair's row of x to its place by expert: a program a pair, and one that lists the experts.

    Args:
        x: bfloat16 `[T, K]`.
        ids: int32 `[T, k]`, the experts of each token; rows of -1 come first, in no slot.
        experts: E.
        factor: float32 `[T]` that a row is multiplied by on the way; None for 1.
        interpret: run the kernel body in Pallas' interpreter.
    """
    (tokens, choices), inner = ids.shape, x.shape[1]
    pairs = tokens * choices
    slots = jax.ShapeDtypeStruct((min(pairs, experts),), jnp.int32)
    shapes = (jax.ShapeDtypeStruct((pairs, inner), x.dtype), slots, slots, slots, jax.ShapeDtypeStruct((pairs,), "i4"))
    operands = (x, ids.reshape(pairs), *(() if factor is None else (factor,)))
    outs = pl.pallas_call(
        functools.partial(_sort_kernel, pairs=pairs, choices=choices, experts=experts, inner=inner),
        grid=(pairs + 1,),
        out_shape=shapes,
        compiler_params=plgpu.CompilerParams(num_warps=4),
        interpret=interpret,
        name="sort_rows",
    )(*operands)
    return SortedRows(*outs)


def _sort_kernel(x_ref, ids_ref, *refs, pairs: int, choices: int, experts: int, inner: int) -> None:
    *factor_refs, out_ref, expert_ref, start_ref, end_ref, place_ref = refs
    mine = pl.program_id(0)
    pair = jnp.arange(pl.next_power_of_2(pairs), dtype=jnp.int32)
    ids = plgpu.load(ids_ref.at[pair], mask=pair < pairs, other=experts)

    @pl.when(mine < pairs)
    def _():
        expert = ids_ref[mine]
        before = (ids < expert) | ((ids == expert) & (pair < mine))
        place = jnp.sum(before.astype(jnp.int32))
        place_ref[mine] = place
        column = jnp.arange(pl.next_power_of_2(inner), dtype=jnp.int32)
        row = plgpu.load(x_ref.at[mine // choices, column], mask=column < inner, other=0)
        if factor_refs:
            row = (row.astype(jnp.float32) * factor_refs[0][mine // choices]).astype(row.dtype)
        plgpu.store(out_ref.at[place, column], row, mask=column < inner)

    @pl.when(mine == pairs)
    def _():
        expert = jnp.arange(pl.next_power_of_2(experts), dtype=jnp.int32)
        start = jnp.sum((ids[None, :] < expert[:, None]).astype(jnp.int32), axis=1)
        count = jnp.sum((ids[None, :] == expert[:, None]).astype(jnp.int32), axis=1)
        chosen = ((count > 0) & (expert < experts)).astype(jnp.int32)
        # Chosen experts take the first slots, the others those behind, so that each slot is written once.
        rank = jnp.cumsum(chosen) - 1
        slot = jnp.where(chosen == 1, rank, jnp.sum(chosen) + expert - 1 - rank)
        held = (slot < min(pairs, experts)) & (expert < experts)
        slot = jnp.where(held, slot, NOWHERE)
        for ref, value in ((expert_ref, expert), (start_ref, start), (end_ref, start + count)):
            plgpu.store(ref.at[slot], value, mask=held)


def packed_product(
    rows: SortedRows,
    matrices: PackedMatrices,
    *,
    gate: Gate | None = None,
    bias: jax.Array | None = None,
    factor: jax.Array | None = None,
    tiles: FragmentTiles,
    column_tiles: int,
    interpret: bool = False,
) -> jax.Array:
    """`out[r] = factor * matrix_e x[r] + bias_e` for the rows of each expert e.

    Args:
        rows: by expert.
        matrices: E of `[N, K]`; gated, tiles of eight gate rows and their eight up rows.
        gate: joins the two halves of each tile.
        bias: `[E, N]`; gated, gates then ups.
        factor: float32 `[1]`, of the one row that all pairs share; None for 1.
        tiles: how the work is cut.
        column_tiles: most tiles of 8 tokens that one decoded tile serves.
        interpret: run the kernel body in Pallas' interpreter.

    Returns:
        bfloat16 `[P, N]` or, gated, `[P, N / 2]`, in the order of the rows.
    """
    spec = _Spec(
        pairs=rows.place.shape[0],
        inner=rows.x.shape[1],
        rows=matrices.words.shape[1] * TILE_ROWS,
        is_shared=rows.x.shape[0] < rows.place.shape[0],
        gate=gate,
        column_tiles=column_tiles,
        tiles=tiles,
        interpret=interpret,
    )
    values = lax.bitcast_convert_type(rows.x.reshape(-1, 2), jnp.int32)
    flat = PackedMatrices(matrices.words.reshape(-1), matrices.factors.reshape(-1), matrices.units)
    return _call(spec, _Operands(values, flat, rows.expert, rows.start, rows.end, bias, factor))


@functools.partial(jax.jit, static_argnums=0)
def _call(spec: _Spec, operands: _Operands) -> jax.Array:
    """The kernel call. Nested jit: the layers of a model trace and lower it once."""
    inputs, structure = jax.tree.flatten(operands)
    tiles = spec.tiles
    return pl.pallas_call(
        functools.partial(_kernel, spec=spec, structure=structure),
        grid=(-(-spec.rows // (TILE_ROWS * tiles.row_tiles)), operands.expert.shape[0]),
        out_shape=jax.ShapeDtypeStruct((spec.pairs, spec.columns), jnp.bfloat16),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=1),
        interpret=spec.interpret,
        name="experts_mxfp4",
    )(*inputs)


def _kernel(*refs, spec: _Spec, structure) -> None:
    *held, out_ref = refs
    operands = jax.tree.unflatten(structure, held)
    block, slot = pl.program_id(0), pl.program_id(1)
    start, end, expert = operands.start[slot], operands.end[slot], operands.expert[slot]
    wide = TOKENS * spec.column_tiles
    end = jnp.where(expert < 0, start, end)

    def chunk(index, carry):
        first = start + index * wide
        if spec.column_tiles == 1:
            _multiply(operands, out_ref, block, expert, first, end, 1, spec)
        else:
            pl.when(end - first <= TOKENS)(lambda: _multiply(operands, out_ref, block, expert, first, end, 1, spec))
            pl.when(end - first > TOKENS)(
                lambda: _multiply(operands, out_ref, block, expert, first, end, spec.column_tiles, spec)
            )
        return carry

    lax.fori_loop(0, pl.cdiv(end - start, wide), chunk, 0)


def _multiply(operands: _Operands, out_ref, block, expert, first, end, column_tiles: int, spec: _Spec) -> None:
    """A program's rows of one expert times rows `first:end` of x, up to 8 a column tile."""
    x_ref, matrices = operands[:2]
    tiles, groups, quads = spec.tiles, -(-spec.inner // TILE_COLUMNS), -(-spec.inner // QUAD_COLUMNS)
    held = min(QUAD, groups)  # groups of a quad that can be there
    width = tiles.warps * TILE_WORDS
    lane4 = jnp.arange(width, dtype=jnp.int32)  # lane after lane, four a lane, warp after warp
    warp, quad = _div(lane4, TILE_WORDS), _div(lane4, 4 * LANE_WORDS)
    in_warp, in_quad = lane4 - warp * TILE_WORDS, lane4 - quad * (4 * LANE_WORDS)
    token = quad - warp * TOKENS
    in_four = lane4 - _div(lane4, QUAD) * QUAD
    x_at, inside = [], []
    for tile in range(column_tiles):
        place = first + token + tile * TOKENS
        inside.append(place < end)
        row = place * 0 if spec.is_shared else place
        x_at.append(row * (spec.inner // 2) + in_quad)
    tile_rows = [block * tiles.row_tiles + index for index in range(tiles.row_tiles)]
    tile_at = [expert * (spec.rows // TILE_ROWS) + at for at in tile_rows]
    exact = spec.rows % (TILE_ROWS * tiles.row_tiles) == 0
    row_masks = [None if exact else (at < spec.rows // TILE_ROWS) & (lane4 >= 0) for at in tile_rows]
    biases = [_load_bias(operands, expert, at, spec) for at in tile_rows]

    def fetch(first_quad, whole: bool):
        """Words of the four groups of each warp's quad, and their factors, for every row tile."""
        mine = first_quad + warp
        fetched = []
        for at, row_mask in zip(tile_at, row_masks, strict=True):
            words = []
            for index in range(held):
                group = mine * QUAD + index
                mask = row_mask if whole else _both(group < groups, row_mask)
                place = (at * groups + group) * TILE_WORDS + in_warp
                words.append(plgpu.load(matrices.words.at[place], mask=mask, other=None if mask is None else 0))
            mask = row_mask if whole else _both(mine < quads, row_mask)
            place = (at * quads + mine) * QUAD_FACTORS + token * QUAD + in_four
            factors = plgpu.load(matrices.factors.at[place], mask=mask, other=None if mask is None else 0)
            fetched.append((words, factors))
        return fetched

    def load_tokens(group, tile: int, whole: bool):
        """Both halves of each warp's group of a column tile's tokens."""
        halves = []
        for half in range(2):
            column = group * (TILE_COLUMNS // 2) + half * 16
            mask = inside[tile]
            if not whole or spec.inner % TILE_COLUMNS:
                mask = mask & (column < spec.inner // 2)
            halves.append(plgpu.load(x_ref.at[x_at[tile] + column], mask=mask, other=0))
        return halves

    def multiply(first_quad, fetched, sums, whole: bool):
        sums = list(sums)
        for index in range(held):
            group = (first_quad + warp) * QUAD + index
            halves = [load_tokens(group, tile, whole) for tile in range(column_tiles)]
            for row, (words, factors) in enumerate(fetched):
                registers = tuple(
                    decode_register(words[index], factors, index, r, interpret=spec.interpret) for r in range(4)
                )
                for tile in range(column_tiles):
                    at = row * column_tiles + tile
                    sums[at] = multiply_fragments(sums[at], registers, *halves[tile], interpret=spec.interpret)
        return sums

    def turn(index, carry):
        """Asks for the next pass before it multiplies this one."""
        fetched, sums = carry
        later = fetch((index + 1) * tiles.warps, True)
        return later, multiply(index * tiles.warps, fetched, sums, True)

    passes = groups // (QUAD * tiles.warps)  # in which every warp has a whole quad
    sums = [jnp.zeros((width,), jnp.float32)] * (tiles.row_tiles * column_tiles)
    fetched = fetch(0, passes > 0)
    if passes:
        fetched, sums = lax.fori_loop(0, passes - 1, turn, (fetched, sums))
        rest = passes * QUAD * tiles.warps < groups
        last = fetch(passes * tiles.warps, False) if rest else None
        sums = multiply((passes - 1) * tiles.warps, fetched, sums, True)
        sums = multiply(passes * tiles.warps, last, sums, False) if rest else sums
    else:
        sums = multiply(0, fetched, sums, False)
    for row in range(tiles.row_tiles):
        for tile in range(column_tiles):
            at = row * column_tiles + tile
            _finish(operands, out_ref, expert, first + tile * TOKENS, end, tile_rows[row], biases[row], sums[at], spec)


def _load_bias(operands: _Operands, expert, tile_row, spec: _Spec) -> tuple[jax.Array, jax.Array] | None:
    """A tile's biases, float32 `[8]` for each row half; asked for before the product, which takes longer."""
    if operands.bias is None:
        return None
    starts = (0, spec.columns) if spec.gate else (0, 8)
    row = tile_row * (8 if spec.gate else TILE_ROWS) + jnp.arange(8, dtype=jnp.int32)
    inside = (tile_row < spec.rows // TILE_ROWS) & (row >= 0)
    loaded = [plgpu.load(operands.bias.at[expert, start + row], mask=inside, other=0) for start in starts]
    return loaded[0].astype(jnp.float32), loaded[1].astype(jnp.float32)


def _finish(operands: _Operands, out_ref, expert, first, end, tile_row, bias, sums, spec: _Spec) -> None:
    """Adds the warps' sums of one tile and 8 tokens, and stores what becomes of them."""
    unit = operands.matrices.units[expert]
    if operands.factor is not None:
        unit = unit * operands.factor[0]
    split = sums.reshape(spec.tiles.warps, TILE_WORDS).sum(axis=0).reshape(8, 4, 2, 2)  # g, j, row half, token
    second = jnp.arange(2, dtype=jnp.int32)[None, None, :, None] == 1
    halves = [jnp.sum(jnp.where(second == wanted, split, 0.0), axis=2) * unit for wanted in (False, True)]
    token = 2 * jnp.arange(4, dtype=jnp.int32)[None, :, None] + jnp.arange(2, dtype=jnp.int32)[None, None, :]
    g = jnp.arange(8, dtype=jnp.int32)[:, None, None] + 0 * token
    place = first + token + 0 * g
    inside = (place < end) & (tile_row < spec.rows // TILE_ROWS)
    gated = spec.gate is not None
    rows = [tile_row * 8 + g] * 2 if gated else [tile_row * TILE_ROWS + 8 * half + g for half in range(2)]
    if bias is not None:
        halves = [half + each[:, None, None] for half, each in zip(halves, bias, strict=True)]
    outs = list(zip(halves, rows, strict=True))
    if spec.gate is not None:
        outs = [(spec.gate(halves[0], halves[1]), rows[0])]
    for out, row in outs:
        plgpu.store(out_ref.at[jnp.where(inside, place, NOWHERE), row], out.astype(out_ref.dtype), mask=inside)


def _div(a: jax.Array, b: int) -> jax.Array:
    """Of non-negative numbers. Floor division and remainders hide from Triton which neighbours are equal."""
    return lax.div(a, jnp.full_like(a, b))


def _both(one: jax.Array, other: jax.Array | None) -> jax.Array:
    return one if other is None else one & other
