"""Registers of a warpgroup for products with MXFP4 words: what a lane holds, written in MLIR.

Arrays cannot say which lane holds what, and here nothing moves between lanes: words become the left operand of `wgmma`
where they are, and sums leave from where they were made. A warpgroup has `BLOCKS` operands of 64 rows at a time, in
each of them one tile of 16 rows a warp.
"""

# JAX leaves types of what is used here incomplete, and other ones incomplete from release to release.
# mypy: disable-error-code="abstract,arg-type,attr-defined,call-arg,no-any-return,return-value,unused-ignore"

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref, vector

from resin.pallas_kernels.mxfp4 import (
    LANE_WORDS,
    QUAD,
    REGISTER_BITS,
    TILE_COLUMNS,
    TILE_ROWS,
    TILE_WORDS,
)

WARPS = 4  # of a warpgroup, a tile of 16 rows each
BLOCKS = 2  # of 64 rows a warpgroup
BLOCK_ROWS = WARPS * TILE_ROWS  # of one `wgmma`
HALF_ROWS = TILE_ROWS // 2
DEALT = (2, 4, LANE_WORDS, 2)  # columns of a group: half h, lane j, product s, value q


def deal_columns(x: jax.Array) -> jax.Array:
    """`[T, K]` to `[T, ceil(K / 64) * 64]`: each group's columns (h, j, s, q) in the order (s, h, j, q) of products."""
    tokens, inner = x.shape
    groups = -(-inner // TILE_COLUMNS)
    padded = jnp.pad(x, ((0, 0), (0, groups * TILE_COLUMNS - inner)))
    return padded.reshape(tokens, groups, *DEALT).transpose(0, 1, 4, 2, 3, 5).reshape(tokens, groups * TILE_COLUMNS)


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


def decode_tiles(words_ref, factors_ref, first_tile, in_quad, group: int) -> jax.Array:
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


def tile_halves(sums: jax.Array, pairs: int) -> tuple[jax.Array, jax.Array]:
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


def half_bias(ref, expert, first_tile, start: int, stride: int, pairs: int) -> jax.Array:
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


def store_halves(outs: tuple[jax.Array, ...], shared_ref, first_tile, row_tiles: int) -> None:
    """A warpgroup's results to bfloat16 `[pairs, columns]`, and zeros for tiles that no matrix has.

    Args:
        outs: `[64, pairs]` each: rows g and g + 8 of the tiles, or what a gate made of both, whose columns are dealt.
        shared_ref: `[pairs, columns]`.
        first_tile: of the warpgroup in the matrix.
        row_tiles: of the matrix.
    """
    pairs, is_gated = shared_ref.shape[0], len(outs) == 1

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR, *[_HALF] * len(outs)))
    def store(_, ref, first_tile, *outs):
        warp, g, j = _warp_and_lane()
        bfloat16 = ir.BF16Type.get()
        zero = arith.constant(bfloat16, ir.FloatAttr.get(bfloat16, 0.0))
        for half, block in np.ndindex(len(outs), BLOCKS):
            tile = arith.addi(warp, _int(WARPS * block))
            is_there = arith.cmpi(arith.CmpIPredicate.slt, arith.addi(_scalar(first_tile), tile), _int(row_tiles))
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
