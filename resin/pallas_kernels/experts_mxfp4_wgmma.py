"""Products of several tokens with MXFP4 experts on Hopper: decoded in registers, where `wgmma` takes its left operand.

`out[p] = matrix_e x[p] + bias_e`, gated or not, for pairs p that lie expert by expert, each expert's share filled up
to whole tiles (`tile_pairs`). Grid (blocks of row tiles of a matrix, tiles of pairs).

A lane's words of `mxfp4.py` are four left operands of 64 x 16 as `wgmma` wants them in registers, one tile of 16 rows
a warp: a shift, a mask and a multiplication make two bfloat16, and nothing of a matrix is written anywhere. Sums do
not care for the order of columns, so x comes with its columns dealt as the words have them (`deal_columns`), and the
gated product leaves its own dealt for the next.

Mosaic GPU lowers this body. Other GPUs and the interpreter take `experts_mxfp4_sorted.py`.
"""

# JAX leaves types of what is used here incomplete, and other ones incomplete from release to release.
# mypy: disable-error-code="abstract,arg-type,attr-defined,call-arg,no-any-return,return-value,unused-ignore"

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from resin.pallas_kernels.gates import Gate
from resin.pallas_kernels.mxfp4 import QUAD, QUAD_FACTORS, TILE_COLUMNS, TILE_ROWS, TILE_WORDS, PackedMatrices
from resin.pallas_kernels.mxfp4_registers import (
    BLOCK_ROWS,
    BLOCKS,
    HALF_ROWS,
    WARPS,
    decode_tiles,
    half_bias,
    store_halves,
    tile_halves,
)
from resin.pallas_kernels.pair_tiles import PairTiles

DECODERS = 2  # warpgroups that multiply beside one that loads
LOADER_REGISTERS = 40


@dataclass(frozen=True, slots=True)
class WgmmaTiles:
    """How the work is cut.

    Attributes:
        pairs: rows of x a program, a multiple of 8 up to 256.
        groups: groups of 64 columns a step: 1, 2.
        stages: steps under way at once.
        has_loader: two warpgroups share the pairs, and a third one loads; otherwise one does everything.
    """

    pairs: int
    groups: int
    stages: int
    has_loader: bool

    @property
    def warpgroups(self) -> int:
        return DECODERS if self.has_loader else 1

    @property
    def row_tiles(self) -> int:
        """Tiles of 16 rows of a matrix a program."""
        return self.warpgroups * BLOCKS * WARPS


# Measured on an H200, 32 experts of 5760 x 2880 and 2880 x 2880, 4 taken, us for the gated product and the one down:
# 117 and 68 at 128 tokens, 228 and 117 at 512, 974 and 510 at 4096 (558 TFLOP/s, of which a tenth fills up tiles).
FEW, SOME, MANY = (
    WgmmaTiles(32, groups=2, stages=3, has_loader=False),
    WgmmaTiles(64, groups=2, stages=3, has_loader=False),
    WgmmaTiles(128, groups=2, stages=3, has_loader=True),
)


def choose_wgmma_tiles(pairs: int, experts: int) -> WgmmaTiles:
    """Tiles that most experts' pairs fill without a second one."""
    share = pairs / experts
    return FEW if share <= 16 else SOME if share <= 32 else MANY


class _Operands(NamedTuple):
    """Arrays of a call or, in the kernel, their references."""

    x: Any  # bfloat16 [R, groups * 64], dealt
    words: Any  # int32 [E * row tiles, groups * 128]
    factors: Any  # int32 [E * row tiles, quads * 32]
    units: Any
    expert: Any
    live_tiles: Any
    bias: Any


@dataclass(frozen=True, slots=True)
class _Spec:
    """Everything static about one call."""

    rows: int  # of x
    row_tiles: int  # of a matrix
    groups: int
    gate: Gate | None
    tiles: WgmmaTiles

    @property
    def tile_columns(self) -> int:
        """Columns of the result that a tile of 16 rows makes."""
        return HALF_ROWS if self.gate else TILE_ROWS

    @property
    def columns(self) -> int:
        """Of the result, with the zeros that fill the last group of a gated one."""
        columns = self.row_tiles * self.tile_columns
        return -(-columns // TILE_COLUMNS) * TILE_COLUMNS if self.gate else columns

    @property
    def group_columns(self) -> int:
        """Columns of the result that a warpgroup makes."""
        return BLOCKS * WARPS * self.tile_columns


def wgmma_product(
    x: jax.Array,
    matrices: PackedMatrices,
    pairs: PairTiles,
    *,
    gate: Gate | None = None,
    bias: jax.Array | None = None,
    tiles: WgmmaTiles,
) -> jax.Array:
    """`out[r] = matrix_e x[r] + bias_e` for the rows of every live tile; the others are undefined.

    Args:
        x: bfloat16 `[R, K']`, rows as `pairs` has them, columns as `deal_columns` leaves them.
        matrices: E of `[N, K]`; gated, tiles of eight gate rows and their eight up rows.
        pairs: by expert, in tiles of `tiles.pairs`.
        gate: joins the two halves of each tile.
        bias: `[E, N]`; gated, gates then ups.
        tiles: how the work is cut.

    Returns:
        bfloat16 `[R, N]` or, gated, `[R, ceil(N / 128) * 64]` with columns dealt and zeros past N / 2.
    """
    experts, row_tiles, groups, _ = matrices.words.shape
    spec = _Spec(x.shape[0], row_tiles, groups, gate, tiles)
    words = matrices.words.reshape(experts * row_tiles, -1)
    factors = matrices.factors.reshape(experts * row_tiles, -1)
    return _call(spec, _Operands(x, words, factors, matrices.units, pairs.expert, pairs.live_tiles, bias))


@functools.partial(jax.jit, static_argnums=0)
def _call(spec: _Spec, operands: _Operands) -> jax.Array:
    """The kernel call. Nested jit: the layers of a model trace and lower it once."""
    inputs, structure = jax.tree.flatten(operands)
    tiles = spec.tiles
    threads = {"num_threads": DECODERS + 1, "thread_name": "warpgroup"} if tiles.has_loader else {}
    kernel = plgpu.kernel(
        functools.partial(_kernel, spec=spec, structure=structure),
        out_type=jax.ShapeDtypeStruct((spec.rows, spec.columns), jnp.bfloat16),
        grid=(-(-spec.row_tiles // tiles.row_tiles), spec.rows // tiles.pairs),
        grid_names=("block", "tile"),
        scratch_types=[plgpu.SMEM((tiles.warpgroups, tiles.pairs, spec.group_columns), jnp.bfloat16)],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **threads,
    )
    return kernel(*inputs)


def _kernel(*refs, spec: _Spec, structure) -> None:
    *held, out_ref, shared_ref = refs
    operands = jax.tree.unflatten(structure, held)
    block, tile = lax.axis_index("block"), lax.axis_index("tile")

    @pl.when(tile < operands.live_tiles[0])
    def _():
        _product(operands, out_ref, shared_ref, block, tile, spec)


def _product(operands: _Operands, out_ref, shared_ref, block, tile, spec: _Spec) -> None:
    tiles = spec.tiles
    warpgroup = lax.axis_index("warpgroup") if tiles.has_loader else jnp.int32(0)
    expert = operands.expert[tile]
    first_tile = block * tiles.row_tiles
    mine = warpgroup * (BLOCKS * WARPS)  # first tile of this warpgroup in the program's
    width = tiles.groups * TILE_COLUMNS

    def multiply(step, x_ref, words_ref, factors_ref, sums):
        for group in range(tiles.groups):
            in_quad = lax.rem(step * tiles.groups, jnp.int32(QUAD)) + group
            matrix = decode_tiles(words_ref, factors_ref, mine, in_quad, group)
            plgpu.wgmma(sums, matrix, x_ref.at[:, pl.ds(group * TILE_COLUMNS, TILE_COLUMNS)].transpose((1, 0)))
        plgpu.wgmma_wait(0)

    def run(multiply_all: Callable[[Any], None]) -> None:
        @functools.partial(
            pl.run_scoped, sums=plgpu.WGMMAAccumulatorRef((BLOCKS * BLOCK_ROWS, tiles.pairs), jnp.float32)
        )
        def _(sums):
            multiply_all(sums)
            halves = tuple(half * operands.units[expert] for half in tile_halves(sums[...], tiles.pairs))
            _finish(halves, operands.bias, shared_ref.at[warpgroup], expert, first_tile + mine, spec)
            column = (block * tiles.warpgroups + warpgroup) * spec.group_columns
            place = out_ref.at[pl.ds(tile * tiles.pairs, tiles.pairs), pl.ds(column, spec.group_columns)]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(shared_ref.at[warpgroup], place)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    swizzled = plgpu.TilingTransform((8, TILE_COLUMNS)), plgpu.SwizzleTransform(2 * TILE_COLUMNS)
    quad = lambda step: lax.div(step * tiles.groups, jnp.int32(QUAD))  # noqa: E731
    specs = [
        plgpu.BlockSpec((tiles.pairs, width), lambda step: (0, step), transforms=swizzled, memory_space=plgpu.SMEM),
        plgpu.BlockSpec((tiles.row_tiles, tiles.groups * TILE_WORDS), lambda step: (0, step), memory_space=plgpu.SMEM),
        plgpu.BlockSpec((tiles.row_tiles, QUAD_FACTORS), lambda step: (0, quad(step)), memory_space=plgpu.SMEM),
    ]
    common: dict[str, Any] = {
        "grid": (-(-spec.groups // tiles.groups),),
        "in_specs": specs,
        "max_concurrent_steps": tiles.stages,
    }
    matrix_rows = pl.ds(expert * spec.row_tiles + first_tile, tiles.row_tiles)
    sources = (
        operands.x.at[pl.ds(tile * tiles.pairs, tiles.pairs), :],
        operands.words.at[matrix_rows, :],
        operands.factors.at[matrix_rows, :],
    )
    if tiles.has_loader:

        def shared_step(index, *refs_and_sums):
            multiply(index[0], *refs_and_sums)
            return refs_and_sums[-1]

        plgpu.emit_pipeline_warp_specialized(
            shared_step,
            wg_axis="warpgroup",
            num_compute_wgs=DECODERS,
            memory_registers=LOADER_REGISTERS,
            compute_context=run,
            **common,
        )(*sources)
    else:
        run(lambda sums: plgpu.emit_pipeline(lambda index, *refs: multiply(index[0], *refs, sums), **common)(*sources))


def _finish(halves, bias_ref, shared_ref, expert, first_tile, spec: _Spec) -> None:
    """Bias and gate of a warpgroup's sums, and the result as rows of pairs."""
    pairs, width = spec.tiles.pairs, spec.row_tiles * spec.tile_columns
    if bias_ref is not None:
        stride, starts = spec.tile_columns, (0, width if spec.gate else HALF_ROWS)
        halves = tuple(
            half + half_bias(bias_ref, expert, first_tile, start, stride, pairs)
            for half, start in zip(halves, starts, strict=True)
        )
    if spec.gate is None:
        store_halves(halves, shared_ref, first_tile, spec.row_tiles)
    else:
        store_halves((spec.gate(*halves),), shared_ref, first_tile, spec.row_tiles)
