"""Products of many tokens with MXFP4 experts: codes become bfloat16 tiles in registers, once for 128 pairs.

`out[p] = matrix_e x[r] + bias_e`, gated or not, for pairs p sorted by expert e and cut into row tiles of one
expert each, as `experts.py` cuts them. Grid (blocks of row tiles of a matrix, row tiles of pairs).

The words of `mxfp4.py` lie in the order of another product. Taken as they are, register r of a tile's words is a matrix
of its own, eight rows by a quarter of the columns: half h of each group and the first or second value q of each pair.
Sums do not care for the order of columns, so x comes with its columns dealt the same way, and each register is
multiplied where it is.
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

from resin.pallas_kernels.experts import SortedPairs
from resin.pallas_kernels.gates import Gate
from resin.pallas_kernels.mxfp4 import (
    LANE_WORDS,
    QUAD,
    QUAD_FACTORS,
    TILE_COLUMNS,
    TILE_ROWS,
    TILE_WORDS,
    PackedMatrices,
    scaled_pair,
)
from resin.pallas_kernels.tiles import NOWHERE, tile_dot

QUARTERS = 4  # of a row of x: half h, value q


@dataclass(frozen=True, slots=True)
class SortedTiles:
    """How the work is cut.

    Attributes:
        pairs: rows of x a program.
        row_tiles: tiles of 16 rows of a matrix a program, a power of two.
        groups: groups of 64 columns a step.
        num_warps, num_stages: of the program.
    """

    pairs: int
    row_tiles: int
    groups: int
    num_warps: int
    num_stages: int


# Measured on an H200, 4096 tokens, 4 of 32 experts of 5760 x 2880 and 2880 x 2880: 284 and 217 TFLOP/s, with one group
# 247 and 190. Loads of x are pipelined only while no mask of columns is on them, so that x is padded to whole steps.
SORTED = SortedTiles(pairs=128, row_tiles=8, groups=2, num_warps=4, num_stages=3)


class _Operands(NamedTuple):
    """Arrays of a call or, in the kernel, their references."""

    x: Any  # [rows, 4, K / 4]
    matrices: Any
    lists: Any
    bias: Any


@dataclass(frozen=True, slots=True)
class _Spec:
    """Everything static about one call."""

    pairs: int
    groups: int
    rows: int  # of a matrix
    pairs_per_row: int
    gate: Gate | None
    tiles: SortedTiles
    interpret: bool

    @property
    def columns(self) -> int:
        """Of the result: gate and up make one."""
        return self.rows // 2 if self.gate else self.rows


def deal_columns(x: jax.Array, groups: int) -> jax.Array:
    """`[T, K]` to `[T, 4, groups * 16]`: for each half and value (h, q) the columns (group, j, s), zero past K."""
    tokens, inner = x.shape
    padded = jnp.pad(x, ((0, 0), (0, groups * TILE_COLUMNS - inner)))
    parts = padded.reshape(tokens, -1, 2, 4, LANE_WORDS, 2)  # group, h, j, s, q
    return parts.transpose(0, 2, 5, 1, 3, 4).reshape(tokens, QUARTERS, -1)


def packed_sorted_product(
    x: jax.Array,
    matrices: PackedMatrices,
    lists: SortedPairs,
    pairs_per_row: int,
    *,
    gate: Gate | None = None,
    bias: jax.Array | None = None,
    tiles: SortedTiles = SORTED,
    interpret: bool = False,
) -> jax.Array:
    """`out[p] = matrix_e x[p // pairs_per_row] + bias_e` for every pair.

    Args:
        x: bfloat16 `[P / pairs_per_row, K]`.
        matrices: E of `[N, K]`; gated, tiles of eight gate rows and their eight up rows.
        lists: pairs by expert, cut into tiles of `tiles.pairs`.
        pairs_per_row: consecutive pairs that share a row of x.
        gate: joins the two halves of each tile.
        bias: `[E, N]`; gated, gates then ups.
        tiles: how the work is cut.
        interpret: run the kernel body in Pallas' interpreter.

    Returns:
        bfloat16 `[P, N]` or, gated, `[P, N / 2]`.
    """
    row_tiles, groups = matrices.words.shape[1:3]
    spec = _Spec(
        pairs=lists.pairs.shape[0],
        groups=groups,
        rows=row_tiles * TILE_ROWS,
        pairs_per_row=pairs_per_row,
        gate=gate,
        tiles=tiles,
        interpret=interpret,
    )
    flat = PackedMatrices(matrices.words.reshape(-1), matrices.factors.reshape(-1), matrices.units)
    return _call(spec, _Operands(deal_columns(x, -(-groups // tiles.groups) * tiles.groups), flat, lists, bias))


@functools.partial(jax.jit, static_argnums=0)
def _call(spec: _Spec, operands: _Operands) -> jax.Array:
    """The kernel call. Nested jit: the layers of a model trace and lower it once."""
    inputs, structure = jax.tree.flatten(operands)
    tiles = spec.tiles
    return pl.pallas_call(
        functools.partial(_kernel, spec=spec, structure=structure),
        grid=(-(-spec.rows // (TILE_ROWS * tiles.row_tiles)), operands.lists.expert.shape[0]),
        out_shape=jax.ShapeDtypeStruct((spec.pairs, spec.columns), jnp.bfloat16),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=spec.interpret,
        name="experts_mxfp4_sorted",
    )(*inputs)


def _kernel(*refs, spec: _Spec, structure) -> None:
    *held, out_ref = refs
    operands = jax.tree.unflatten(structure, held)
    lists = operands.lists
    block, tile = pl.program_id(0), pl.program_id(1)

    @pl.when(tile < lists.live_tiles[0])
    def _():
        place = lists.start[tile] + jnp.arange(spec.tiles.pairs, dtype=jnp.int32)
        live = place < lists.end[tile]
        pair = plgpu.load(lists.pairs.at[place], mask=live, other=0)
        _product(operands, out_ref, block, lists.expert[tile], pair, live, spec)


def _product(operands: _Operands, out_ref, block, expert, pair, live, spec: _Spec) -> None:
    """Both row halves of a block of a matrix's tiles, transposed: `[8 * row_tiles, pairs]` each."""
    x_ref, matrices, _, bias_ref = operands
    tiles = spec.tiles
    width = TILE_COLUMNS // QUARTERS  # columns of a group in a register's matrix
    row = jnp.arange(8 * tiles.row_tiles, dtype=jnp.int32)  # of a half: tile, g
    tile, g = row // 8, row % 8
    tile_row = block * tiles.row_tiles + tile
    exact_rows = spec.rows % (TILE_ROWS * tiles.row_tiles) == 0
    held_rows = None if exact_rows else tile_row < spec.rows // TILE_ROWS
    tile_at = (expert * (spec.rows // TILE_ROWS) + tile_row) * spec.groups
    tile_at_quads = (expert * (spec.rows // TILE_ROWS) + tile_row) * (-(-spec.groups // QUAD) * QUAD_FACTORS)
    column = jnp.arange(width * tiles.groups, dtype=jnp.int32)
    group, lane = column // width, column % width
    step_groups = jnp.arange(tiles.groups, dtype=jnp.int32)
    exact_groups = spec.groups % tiles.groups == 0
    token = pair // spec.pairs_per_row

    def masked(held_columns, rows_too):
        masks = [mask for mask in (rows_too, held_columns) if mask is not None]
        return None if not masks else functools.reduce(jnp.logical_and, jnp.broadcast_arrays(*masks))

    def step(index, sums):
        first = index * tiles.groups
        held = None if exact_groups else (first + group < spec.groups)[None, :]
        held_groups = None if exact_groups else (first + step_groups < spec.groups)[None, :]
        rows_too = None if held_rows is None else held_rows[:, None]
        mask = masked(held, rows_too)
        at = (tile_at + first)[:, None] * TILE_WORDS + (g * width)[:, None] + (group * TILE_WORDS + lane)[None, :]
        words = plgpu.load(matrices.words.at[at], mask=mask, other=None if mask is None else 0)
        factor_mask = masked(held_groups, rows_too)
        quad, in_quad = (first + step_groups) // QUAD, (first + step_groups) % QUAD
        factor_at = tile_at_quads[:, None] + (g * QUAD)[:, None] + (quad * QUAD_FACTORS + in_quad)[None, :]
        factors = plgpu.load(matrices.factors.at[factor_at], mask=factor_mask, other=None if factor_mask is None else 0)
        spread = jnp.broadcast_to(factors[:, :, None], (*factors.shape, width)).reshape(words.shape)
        out = list(sums)
        for half in range(2):
            dealt = [
                plgpu.load(
                    x_ref.at[token[:, None], 2 * half + second, (first * width + column)[None, :]],
                    mask=live[:, None],
                    other=0,
                )
                for second in range(2)
            ]
            for row_half in range(2):
                register = 2 * half + row_half
                byte = (spread >> (8 * register)) & 0xFF
                pair = scaled_pair(words, byte, register, interpret=spec.interpret)
                for value, tokens in zip(pair, dealt, strict=True):
                    out[row_half] = out[row_half] + tile_dot(value, tokens, trans_b=True)
        return tuple(out)

    zeros = jnp.zeros((8 * tiles.row_tiles, tiles.pairs), jnp.float32)
    halves = lax.fori_loop(0, -(-spec.groups // tiles.groups), step, (zeros, zeros))
    halves = [half * matrices.units[expert] for half in halves]
    gated = spec.gate is not None
    rows = [tile_row * 8 + g] * 2 if gated else [tile_row * TILE_ROWS + 8 * half + g for half in range(2)]
    if bias_ref is not None:
        starts = (0, spec.columns) if gated else (0, 0)
        halves = [
            half
            + plgpu.load(
                bias_ref.at[expert, start + at], mask=held_rows, other=None if held_rows is None else 0
            ).astype(jnp.float32)[:, None]
            for half, at, start in zip(halves, rows, starts, strict=True)
        ]
    outs = list(zip(halves, rows, strict=True))
    if spec.gate is not None:
        outs = [(spec.gate(halves[0], halves[1]), rows[0])]
    place = jnp.where(live, pair, NOWHERE)
    inside = masked(live[None, :], None if held_rows is None else held_rows[:, None])
    for out, at in outs:
        store_at = (place[None, :] + 0 * at[:, None], at[:, None] + 0 * place[None, :])
        plgpu.store(out_ref.at[store_at], out.astype(out_ref.dtype), mask=jnp.broadcast_to(inside, out.shape))
