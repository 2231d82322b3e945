"""MXFP4 matrices in the order of tensor-core fragments: 4-bit values (e2m1), a power of two for each 32 of a row.

A matrix `[rows, K]` is cut into tiles of 16 rows and groups of 64 columns. Lane `4 g + j` of a warp holds rows g and
g + 8 of a tile as the A operand of `mma.m16n8k16` does, for four products of 16 columns each. Columns are dealt so that
what a lane wants of the other operand is contiguous: value q of the pair that lane j has in half h of product s is
column `32 h + 8 j + 2 s + q` of the group (any order will do that both operands follow).

One int32 is a lane's eight codes of one product. Their bits lie so that `(word << 3 r) & REGISTER_BITS` is register r
(rows g and g + 8 of half 0, then of half 1) for r < 3 and a few moves make register 3: two bfloat16, sign, two bits of
exponent and one of fraction, that is the value times 2^-126. It is exact: the smallest codes are subnormal. One
multiplication by 2^(scale - 1) undoes it and applies the scale.

Scales above 2^1 would not fit that factor's exponent: a matrix that has any is shifted down by a power of two, which
its `unit` holds and the sums are multiplied by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import triton as plgpu

GROUP_VALUES = 32  # of a row, that share a scale
BLOCK_BYTES = 16  # of as many values in a checkpoint, low nibble first
TILE_ROWS, TILE_COLUMNS = 16, 64
LANE_WORDS = 4  # int32 that a lane reads of a tile and group: one for each product of 16 columns
TILE_WORDS = 32 * LANE_WORDS
QUAD = 4  # groups whose factors a lane reads together
QUAD_COLUMNS = QUAD * TILE_COLUMNS
QUAD_FACTORS = 8 * QUAD  # int32 of a tile

REGISTER_BITS = 0x81C081C0  # of two bfloat16: sign, the last two bits of the exponent, the first of the fraction
# Bits of a word that hold sign, exponent (high, low) and fraction of the first value of each register; the second
# value's lie 16 higher.
_PLACES = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 11, 10, 13))
_MAX_SCALE = 128  # largest scale byte whose factor 2^(scale - 1 - 127 + 127) is a finite bfloat16


class PackedMatrices(NamedTuple):
    """E matrices `[rows, K]`, or their references in a kernel.

    Attributes:
        words: int32 `[E, rows / 16, ceil(K / 64), 128]`; codes past K are zero.
        factors: int32 `[E, rows / 16, ceil(K / 256), 32]`: for each g and each of four groups one, whose bytes are the
            exponents of rows g and g + 8 in the first 32 columns, then in the second. A byte b stands for 2^(b - 127),
            what takes the decoded values, small by 2^126, to their scale.
        units: float32 `[E]`.
    """

    words: jax.Array
    factors: jax.Array
    units: jax.Array


def packed_shapes(experts: int, rows: int, inner: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shapes of `PackedMatrices` of `[rows, inner]` matrices; rows is a multiple of 16."""
    tiles = experts, rows // TILE_ROWS
    return (
        (*tiles, -(-inner // TILE_COLUMNS), TILE_WORDS),
        (*tiles, -(-inner // QUAD_COLUMNS), QUAD_FACTORS),
        (experts,),
    )


def pack_words(blocks: np.ndarray) -> np.ndarray:
    """uint8 `[rows, K / 32, 16]` of a checkpoint to int32 `[rows / 16, ceil(K / 64), 128]`."""
    rows, groups, _ = blocks.shape
    padded = np.pad(blocks, ((0, 0), (0, groups % 2), (0, 0)))
    parts = padded.reshape(rows // TILE_ROWS, 2, 8, -1, 2, BLOCK_BYTES)  # tile, row half, g, group, h, (j, s)
    words = _WORDS_OF_BYTE[0][parts[:, 0, :, :, 0]]
    for register in range(1, 4):
        words |= _WORDS_OF_BYTE[register][parts[:, register % 2, :, :, register // 2]]
    return words.transpose(0, 2, 1, 3).reshape(rows // TILE_ROWS, -1, TILE_WORDS)


def unpack_words(words: np.ndarray, groups: int) -> np.ndarray:
    """The inverse of `pack_words`: uint8 `[rows, groups, 16]`, groups of 32 columns."""
    tiles = (
        words.reshape(len(words), -1, 8, BLOCK_BYTES).transpose(0, 2, 1, 3).view(np.uint32)
    )  # tile, g, group, (j, s)
    parts = np.zeros((len(words), 2, 8, tiles.shape[2], 2, BLOCK_BYTES), np.uint8)
    for register, places in enumerate(_PLACES):
        for second in range(2):
            for bit, place in zip((3, 2, 1, 0), places, strict=True):
                held = (tiles >> (place + 16 * second) & 1).astype(np.uint8)
                parts[:, register % 2, :, :, register // 2] |= held << (bit + 4 * second)
    return parts.reshape(len(words) * TILE_ROWS, -1, BLOCK_BYTES)[:, :groups]


def scale_shift(scales: np.ndarray) -> int:
    """The exponent that a matrix of these uint8 scales (biased by 127) is shifted down by."""
    return max(int(scales.max(initial=0)) - _MAX_SCALE, 0)


def pack_factors(scales: np.ndarray) -> np.ndarray:
    """uint8 `[rows, K / 32]`, exponents biased by 127, to int32 `[rows / 16, ceil(K / 256), 32]`."""
    rows, groups = scales.shape
    # What a shift takes below the smallest factor is smaller than the largest value by 2^250.
    shifted = np.maximum(scales.astype(np.int32) + (126 - scale_shift(scales)), 1).astype(np.uint8)
    padded = np.pad(shifted, ((0, 0), (0, -groups % (2 * QUAD))), constant_values=1)
    parts = padded.reshape(rows // TILE_ROWS, 2, 8, -1, QUAD, 2)  # tile, row half, g, quad, group, h
    bytes_ = np.ascontiguousarray(parts.transpose(0, 3, 2, 4, 5, 1))
    return bytes_.reshape(-1).view(np.dtype("<i4")).reshape(rows // TILE_ROWS, -1, QUAD_FACTORS)


def unpack_factors(factors: np.ndarray, groups: int) -> np.ndarray:
    """The inverse of `pack_factors` for a matrix that was not shifted: uint8 `[rows, groups]`."""
    parts = (
        factors.astype("<i4").view(np.uint8).reshape(len(factors), -1, 8, QUAD, 2, 2)
    )  # tile, quad, g, group, h, half
    rows = parts.transpose(0, 5, 2, 1, 3, 4).reshape(len(factors) * TILE_ROWS, -1)
    return rows[:, :groups] - np.uint8(126)


def unpack_matrices(packed: PackedMatrices, inner: int, dtype: jnp.dtype) -> jax.Array:
    """Decodes `[..., rows, inner]` from words, factors and units with any leading axes, all the same or none."""
    words, factors, units = packed
    lead = words.shape[:-3]
    tiles, groups = words.shape[-3:-1]
    lanes = words.reshape(*lead, tiles, groups, 8, 4, LANE_WORDS)  # g, j, s
    quads = factors.reshape(*lead, tiles, -1, 8, QUAD).swapaxes(-1, -2)
    held = quads.reshape(*lead, tiles, -1, 8)[..., :groups, :]
    exponents = [(held >> (8 * register)) & 0xFF for register in range(4)]
    unit = units[..., None, None, None]
    halves = []
    for half in range(2):
        values = [_values_of(lanes, half + 2 * h) for h in range(2)]  # each [.., tile, group, g, j, s, q]
        scales = [_power_of_two(exponents[half + 2 * h] - 253, unit)[..., None, None, None] for h in range(2)]
        halves.append(jnp.stack([value * scale for value, scale in zip(values, scales, strict=True)], axis=-4))
    # [.., tile, group, row half, g, h, j, s, q]: rows are (tile, half, g), columns (group, h, j, s, q).
    joined = jnp.stack(halves, axis=-6)
    order = [*range(len(lead) + 1), *(len(lead) + 1 + i for i in (1, 2, 0, 3, 4, 5, 6))]
    matrix = joined.transpose(order).reshape(*lead, tiles * TILE_ROWS, groups * TILE_COLUMNS)[..., :inner]
    return matrix.astype(dtype)


def _values_of(words: jax.Array, register: int) -> jax.Array:
    """float32 `[..., 2]`, the pair of a register without its scale."""
    pairs = []
    for shift in (0, 16):
        sign, high, low, fraction = ((words >> (place + shift)) & 1 for place in _PLACES[register])
        exponent = 2 * high + low
        # Twice the magnitude, an integer: 0, 1, then (2 + fraction) * 2^(exponent - 1), that is 2 3 4 6 8 12.
        doubled = jnp.where(exponent == 0, fraction, (2 + fraction) << jnp.maximum(exponent - 1, 0))
        pairs.append(jnp.where(sign == 1, -doubled, doubled).astype(jnp.float32) * 0.5)
    return jnp.stack(pairs, axis=-1)


def _power_of_two(exponent: jax.Array, times: jax.Array | float = 1.0) -> jax.Array:
    """float32 `times * 2^exponent`, exponents from -252 to 1: in two halves, as the smallest are subnormal."""
    half = exponent >> 1
    first, second = (lax.bitcast_convert_type((part + 127) << 23, jnp.float32) for part in (half, exponent - half))
    return first * times * second


def _words_of_bytes() -> np.ndarray:
    """int32 `[4, 256]`: the bits of a register's two codes (a checkpoint's byte) within a word."""
    table = np.zeros((4, 256), np.uint32)
    byte = np.arange(256, dtype=np.uint32)
    for register, places in enumerate(_PLACES):
        for second in range(2):
            code = byte >> (4 * second) & 15
            for bit, place in zip((3, 2, 1, 0), places, strict=True):
                table[register] |= (code >> bit & 1) << (place + 16 * second)
    return table.view(np.int32)


_WORDS_OF_BYTE = _words_of_bytes()


def decode_register(words: jax.Array, factors: jax.Array, group: int, register: int, *, interpret: bool) -> jax.Array:
    """Register r of every product in a kernel: int32 `[n]`, two bfloat16 each.

    Args:
        words: int32 `[n]`, lane after lane, four a lane.
        factors: int32 `[n]`, those of each lane's rows in four groups.
        group: of the words, 0 to 3.
        register: 0 to 3.
        interpret: compute it in jax; otherwise in PTX, whose "four elements" are what a lane holds.
    """
    if interpret:
        pair = _values_of(words, register)
        byte = (factors.reshape(-1, LANE_WORDS)[:, group] >> (8 * register)) & 0xFF
        scaled = pair * jnp.repeat(_power_of_two(byte - 253), LANE_WORDS)[:, None]
        return lax.bitcast_convert_type(scaled.astype(jnp.bfloat16), jnp.int32)
    return _ptx(_decode_ptx(group, register), ",".join(["=&r"] * 4 + ["r"] * 8), [words, factors], jnp.int32)


def _decode_ptx(group: int, register: int) -> str:
    """$0 to $3 are a lane's results, $4 to $7 its words, $8 to $11 its factors."""
    lines = [f"{{ .reg .b32 f,t,u; prmt.b32 f,${8 + group},0,0x{register}4{register}4; shr.u32 f,f,1;"]
    for step in range(LANE_WORDS):
        word = f"${4 + step}"
        if register < 3:
            lines.append(f"shl.b32 t,{word},{3 * register}; and.b32 t,t,0x{REGISTER_BITS:X};")
        else:
            lines.append(f"shl.b32 t,{word},1; and.b32 t,t,0x80008000; shr.u32 u,{word},3; and.b32 u,u,0x01800180;")
            lines.append(f"or.b32 t,t,u; shr.u32 u,{word},7; and.b32 u,u,0x00400040; or.b32 t,t,u;")
        lines.append(f"mul.bf16x2 ${step},t,f;")
    return " ".join([*lines, "}"])


def scaled_pair(words: jax.Array, factors: jax.Array, register: int, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """A register's two values, bfloat16 in the shape of words, whatever their layout.

    Args:
        words: int32.
        factors: int32 of words' shape, exponents.
        register: 0 to 3.
        interpret: compute it in jax.
    """
    if interpret:
        pair = _values_of(words, register) * _power_of_two(factors - 253)[..., None]
        return pair[..., 0].astype(jnp.bfloat16), pair[..., 1].astype(jnp.bfloat16)
    if register < 3:
        bits = (words << (3 * register)) & _signed(REGISTER_BITS)
    else:
        bits = ((words << 1) & _signed(0x80008000)) | ((words >> 3) & 0x01800180) | ((words >> 7) & 0x00400040)
    factor = lax.bitcast_convert_type((factors << 7).astype(jnp.uint16), jnp.bfloat16)
    first, second = (bits & 0xFFFF).astype(jnp.uint16), ((bits >> 16) & 0xFFFF).astype(jnp.uint16)
    return lax.bitcast_convert_type(first, jnp.bfloat16) * factor, lax.bitcast_convert_type(
        second, jnp.bfloat16
    ) * factor


def _signed(bits: int) -> int:
    return bits - (1 << 32 if bits >> 31 else 0)


def multiply_fragments(
    sums: jax.Array,
    registers: Sequence[jax.Array],
    low: jax.Array,
    high: jax.Array,
    *,
    interpret: bool,
) -> jax.Array:
    """Adds four products `[16, 16] @ [16, 8]` a warp to its sums.

    Args:
        sums: float32 `[n]`, n a multiple of 128: lane `4 g + j` has rows g, g, g + 8, g + 8 of columns 2 j, 2 j + 1.
        registers: int32 `[n]` each, as `decode_register` gives them.
        low, high: int32 `[n]`, two bfloat16 each: lane `4 n + j` has those of half 0 (1) of column n.
        interpret: compute it in jax.

    Returns:
        float32 `[n]`.
    """
    if not interpret:
        return _ptx(_multiply_ptx(), ",".join(["=f"] * 4 + ["f"] * 4 + ["r"] * 24), [sums, *registers, low, high])
    warps = sums.shape[0] // TILE_WORDS

    def pairs(array: jax.Array) -> jax.Array:  # [warps, 8, (j, s, q)]
        wide = lax.bitcast_convert_type(array, jnp.bfloat16).astype(jnp.float32)
        return wide.reshape(warps, 8, 4 * LANE_WORDS * 2)

    def product(first: int) -> jax.Array:  # [warps, g, column]
        parts = ((registers[first], low), (registers[first + 2], high))
        low_part, high_part = (jnp.einsum("wgk,wnk->wgn", pairs(a), pairs(b), precision="highest") for a, b in parts)
        return low_part + high_part

    both = jnp.stack([product(0), product(1)], axis=2).reshape(warps, 8, 2, 4, 2)  # g, row half, j, column
    return sums + both.transpose(0, 1, 3, 2, 4).reshape(-1)


def _multiply_ptx() -> str:
    """$0 to $3 are sums out, $4 to $7 sums in, then four each of registers 0 to 3, low and high."""
    lines = ["{ .reg .f32 d0,d1,d2,d3;", *(f"mov.f32 d{i},${4 + i};" for i in range(4))]
    for step in range(LANE_WORDS):
        a = ",".join(f"${8 + 4 * register + step}" for register in range(4))
        b = f"${24 + step},${28 + step}"
        lines.append(
            f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{d0,d1,d2,d3}}, {{{a}}}, {{{b}}}, {{d0,d1,d2,d3}};"
        )
    return " ".join([*lines, *(f"mov.f32 ${i},d{i};" for i in range(4)), "}"])


def _ptx(asm: str, constraints: str, args: list[jax.Array], dtype=jnp.float32) -> jax.Array:
    (result,) = plgpu.elementwise_inline_asm(
        asm,
        args=args,
        constraints=constraints,
        pack=LANE_WORDS,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
    )
    return result
