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
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref, vector

from resin.pallas_kernels.gates import Gate
from resin.pallas_kernels.mxfp4 import (
    LANE_WORDS,
    QUAD,
    QUAD_FACTORS,
    REGISTER_BITS,
    TILE_COLUMNS,
    TILE_ROWS,
    TILE_WORDS,
    PackedMatrices,
)

WARPS = 4  # of a warpgroup, a tile of 16 rows each
BLOCK_ROWS = WARPS * TILE_ROWS  # of one `wgmma`
HALF_ROWS = TILE_ROWS // 2
DECODERS = 2  # warpgroups that multiply beside one that loads
LOADER_REGISTERS = 40
DEALT = (2, 4, LANE_WORDS, 2)  # columns of a group: half h, lane j, product s, value q


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


BLOCKS = 2  # of 64 rows a warpgroup

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


class PairTiles(NamedTuple):
    """Pairs by expert, each expert's from a new tile on."""

    source: jax.Array  # int32 [R], the pair of each row; any where it has none
    place: jax.Array  # int32 [P], the row of each pair; R for pairs without an expert
    expert: jax.Array  # int32 [tiles]
    live_tiles: jax.Array  # int32 [1]


def tile_pairs(ids: jax.Array, experts: int, tile: int) -> PairTiles:
    """Deals pairs into tiles of one expert each.

    Args:
        ids: int32 `[P]`, the expert of each pair; -1 for none.
        experts: E.
        tile: rows of a tile.
    """
    pairs = ids.shape[0]
    tiles = pairs // tile + min(experts, pairs)
    counts = jnp.sum(ids[:, None] == jnp.arange(experts, dtype=jnp.int32)[None, :], axis=0, dtype=jnp.int32)
    tile_ends = jnp.cumsum(-(-counts // tile), dtype=jnp.int32)
    number = jnp.arange(tiles, dtype=jnp.int32)
    of_tile = jnp.sum(number[:, None] >= tile_ends[None, :], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(of_tile, experts - 1)
    # What takes an expert's pairs from the order by expert to rows.
    shift = (tile_ends - -(-counts // tile)) * tile - (jnp.cumsum(counts, dtype=jnp.int32) - counts)
    key = jnp.where(ids < 0, experts, ids)
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    row = jnp.arange(tiles * tile, dtype=jnp.int32) - jnp.repeat(shift[expert], tile)
    position = jnp.zeros(pairs, jnp.int32).at[order].set(jnp.arange(pairs, dtype=jnp.int32), unique_indices=True)
    place = position + shift[jnp.minimum(key, experts - 1)]
    return PairTiles(
        source=order[jnp.clip(row, 0, pairs - 1)],
        place=jnp.where(ids < 0, tiles * tile, place),
        expert=expert,
        live_tiles=tile_ends[-1:],
    )


def deal_columns(x: jax.Array) -> jax.Array:
    """`[T, K]` to `[T, ceil(K / 64) * 64]`: each group's columns (h, j, s, q) in the order (s, h, j, q) of products."""
    tokens, inner = x.shape
    groups = -(-inner // TILE_COLUMNS)
    padded = jnp.pad(x, ((0, 0), (0, groups * TILE_COLUMNS - inner)))
    return padded.reshape(tokens, groups, *DEALT).transpose(0, 1, 4, 2, 3, 5).reshape(tokens, groups * TILE_COLUMNS)


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
            matrix = _decode(words_ref, factors_ref, mine, in_quad, group)
            plgpu.wgmma(sums, matrix, x_ref.at[:, pl.ds(group * TILE_COLUMNS, TILE_COLUMNS)].transpose((1, 0)))
        plgpu.wgmma_wait(0)

    def run(multiply_all: Callable[[Any], None]) -> None:
        @functools.partial(
            pl.run_scoped, sums=plgpu.WGMMAAccumulatorRef((BLOCKS * BLOCK_ROWS, tiles.pairs), jnp.float32)
        )
        def _(sums):
            multiply_all(sums)
            halves = tuple(half * operands.units[expert] for half in _halves(sums[...], tiles.pairs))
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
            half + _bias(bias_ref, expert, first_tile, start, stride, pairs)
            for half, start in zip(halves, starts, strict=True)
        )
    if spec.gate is None:
        _store(halves, shared_ref, first_tile, spec)
    else:
        _store((spec.gate(*halves),), shared_ref, first_tile, spec)


# What follows writes MLIR: what a lane holds is beyond what arrays can say.

# Rows g (or g + 8) of a warpgroup's tiles by pairs, each lane with those that it has in the sums.
_HALF = plgpu.Layout.TILED(
    plgpu.Tiling(((WARPS * HALF_ROWS, 8), (8, 8), (2,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)
_SCALAR = plgpu.Layout.WG_SPLAT(())


def _half_type(pairs: int) -> plgpu.ShapeDtypeStruct:
    return plgpu.ShapeDtypeStruct((BLOCKS * WARPS * HALF_ROWS, pairs), jnp.float32, layout=_HALF)


def _half_array(registers: np.ndarray) -> mgpu.FragmentedArray:
    return mgpu.FragmentedArray(_registers=registers, _layout=_HALF.to_mgpu(), _is_signed=None)


def _half_registers(pairs: int) -> np.ndarray:
    return np.empty((BLOCKS, pairs // 8, 1, 1, 1, 1, 1), dtype=object)


def _int(value: int) -> ir.Value:
    kind = ir.IntegerType.get_signless(32)
    return arith.constant(kind, ir.IntegerAttr.get(kind, value - (1 << 32 if value >> 31 else 0)))


def _index(value: ir.Value) -> ir.Value:
    return arith.index_cast(ir.IndexType.get(), value)


def _scalar(array: mgpu.FragmentedArray) -> ir.Value:
    return array.registers.item()


def _warp_and_lane() -> tuple[ir.Value, ir.Value, ir.Value]:
    """Warp of the warpgroup, and g and j of the lane `4 g + j`."""
    thread = arith.index_cast(ir.IntegerType.get_signless(32), gpu.thread_id(gpu.Dimension.x))
    warp = arith.andi(arith.shrui(thread, _int(5)), _int(WARPS - 1))
    lane = arith.andi(thread, _int(31))
    return warp, arith.shrui(lane, _int(2)), arith.andi(lane, _int(3))


def _ptx(text: str, *arguments: ir.Value) -> ir.Value:
    constraints = ",".join(["=r"] + ["r"] * len(arguments))
    return llvm.inline_asm(
        ir.IntegerType.get_signless(32), list(arguments), text, constraints, has_side_effects=False, asm_dialect=0
    )


def _decode(words_ref, factors_ref, first_tile, in_quad, group: int) -> jax.Array:
    """A warpgroup's rows of a group of 64 columns, bfloat16 `[128, 64]` in registers.

    Args:
        words_ref: int32 `[row tiles, groups * 128]`.
        factors_ref: int32 `[row tiles, 32]`.
        first_tile: of the warpgroup.
        in_quad: the group's place among the four of the factors.
        group: its place among those of the words.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), _SCALAR, _SCALAR),
        return_type=plgpu.ShapeDtypeStruct(
            (BLOCKS * BLOCK_ROWS, TILE_COLUMNS), jnp.bfloat16, layout=plgpu.Layout.WGMMA
        ),
    )
    def decode(_, words, factors, first_tile, in_quad):
        kind = ir.IntegerType.get_signless(32)
        four, one = ir.VectorType.get((LANE_WORDS,), kind), ir.VectorType.get((1,), kind)
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        warp, g, j = _warp_and_lane()
        lane = arith.addi(arith.muli(g, _int(4)), j)
        word_at = _index(arith.addi(arith.muli(lane, _int(LANE_WORDS)), _int(group * TILE_WORDS)))
        factor_at = _index(arith.addi(arith.muli(g, _int(QUAD)), _scalar(in_quad)))
        registers = np.empty((BLOCKS, TILE_COLUMNS // 8, 1, 1, 2, 1, 1, 1, 1), dtype=object)
        for block in range(BLOCKS):
            tile = _index(arith.addi(_scalar(first_tile), arith.addi(warp, _int(WARPS * block))))
            held = vector.load(four, words, [tile, word_at])
            factor = memref.load(factors, [tile, factor_at])
            # Byte r as the exponent of two bfloat16.
            scales = [_ptx(f"{{ .reg .b32 t; prmt.b32 t,$1,0,0x{r}4{r}4; shr.u32 $0,t,1; }}", factor) for r in range(4)]
            for product in range(LANE_WORDS):
                word = vector.extract(held, dynamic_position=[], static_position=[product])
                for register, scale in enumerate(scales):
                    value = _ptx("mul.bf16x2 $0,$1,$2;", _register_bits(word, register), scale)
                    place = (block, 2 * product + register // 2, 0, 0, register % 2, 0, 0, 0, 0)
                    registers[place] = vector.bitcast(pair, vector.from_elements(one, [value]))
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return decode(words_ref, factors_ref, first_tile, in_quad)


def _register_bits(word: ir.Value, register: int) -> ir.Value:
    """Two bfloat16 of a word without their scale, as `mxfp4.py` has them."""
    if register < 3:
        shifted = arith.shli(word, _int(3 * register)) if register else word
        return arith.andi(shifted, _int(REGISTER_BITS))
    sign = arith.andi(arith.shli(word, _int(1)), _int(0x80008000))
    exponent = arith.andi(arith.shrui(word, _int(3)), _int(0x01800180))
    fraction = arith.andi(arith.shrui(word, _int(7)), _int(0x00400040))
    return arith.ori(arith.ori(sign, exponent), fraction)


def _halves(sums: jax.Array, pairs: int) -> tuple[jax.Array, jax.Array]:
    """Rows g and rows g + 8 of each tile of float32 `[128, pairs]`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=(_half_type(pairs), _half_type(pairs)))
    def take_apart(_, sums):
        halves = []
        for half in range(2):
            registers = _half_registers(pairs)
            for block, columns in np.ndindex(BLOCKS, pairs // 8):
                registers[block, columns] = sums.registers[block, columns, 0, 0, half, 0, 0, 0, 0]
            halves.append(_half_array(registers))
        return tuple(halves)

    return take_apart(sums)


def _bias(ref, expert, first_tile, start: int, stride: int, pairs: int) -> jax.Array:
    """`bias[expert, start + stride * tile + g]` in float32, the same for each pair; past the last, the last."""
    last = ref.shape[1] - 1

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR, _SCALAR), return_type=_half_type(pairs))
    def load(_, ref, expert, first_tile):
        warp, g, _ = _warp_and_lane()
        registers, two = _half_registers(pairs), ir.VectorType.get((2,), ir.F32Type.get())
        for block in range(BLOCKS):
            tile = arith.addi(_scalar(first_tile), arith.addi(warp, _int(WARPS * block)))
            column = arith.addi(arith.muli(tile, _int(stride)), arith.addi(g, _int(start)))
            value = memref.load(ref, [_index(_scalar(expert)), _index(arith.minsi(column, _int(last)))])
            if value.type != ir.F32Type.get():
                value = arith.extf(ir.F32Type.get(), value)
            for columns in range(pairs // 8):
                registers[block, columns] = vector.broadcast(two, value)
        return _half_array(registers)

    return load(ref, expert, first_tile)


def _store(outs: tuple[jax.Array, ...], shared_ref, first_tile, spec: _Spec) -> None:
    """A warpgroup's results to bfloat16 `[pairs, columns]`; gated, dealt, and zeros for tiles that no matrix has."""
    pairs, is_gated = spec.tiles.pairs, spec.gate is not None

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR, *[_HALF] * len(outs)))
    def store(_, ref, first_tile, *outs):
        warp, g, j = _warp_and_lane()
        bfloat16 = ir.BF16Type.get()
        zero = arith.constant(bfloat16, ir.FloatAttr.get(bfloat16, 0.0))
        for half, block in np.ndindex(len(outs), BLOCKS):
            tile = arith.addi(warp, _int(WARPS * block))
            is_there = arith.cmpi(arith.CmpIPredicate.slt, arith.addi(_scalar(first_tile), tile), _int(spec.row_tiles))
            if is_gated:
                # Column 8 tile + g is (h, j, s, q) = (tile / 4, tile % 4, g / 2, g % 2) of its group: here h is the
                # block and j the warp.
                place = arith.addi(arith.muli(arith.shrui(g, _int(1)), _int(16)), arith.andi(g, _int(1)))
                column = arith.addi(place, arith.addi(arith.muli(warp, _int(2)), _int(8 * block)))
            else:
                column = arith.addi(arith.muli(tile, _int(TILE_ROWS)), arith.addi(g, _int(HALF_ROWS * half)))
            for columns, second in np.ndindex(pairs // 8, 2):
                held = outs[half].registers[block, columns, 0, 0, 0, 0, 0]
                value = vector.extract(held, dynamic_position=[], static_position=[int(second)])
                value = arith.select(is_there, arith.truncf(bfloat16, value), zero)
                row = arith.addi(arith.muli(j, _int(2)), _int(int(8 * columns + second)))
                memref.store(value, ref, [_index(row), _index(column)])

    store(shared_ref, first_tile, *outs)
