"""What kernel bodies share: tile products, loads of cache rows, constants of the online softmax."""

from __future__ import annotations

import math
import struct

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from resin.pallas_kernels.fp8 import FP8

MASKED = -1e30  # a masked score
# Where running maxima start: below every real score and far above MASKED times any scale, so that masked scores weigh
# nothing in rows that have seen no other. Both at MASKED would not do: a fused multiply-add subtracts the rounded from
# the exact product, and 2 to that difference may be infinite.
NO_TOP = -1e20
LOG2E = math.log2(math.e)
NOWHERE = 2**31 - 1  # index of what must not be stored; such lanes are masked
MIN_ROWS = 16  # rows of the smallest tensor-core product


def tile_dot(a: jax.Array, b: jax.Array, *, trans_a: bool = False, trans_b: bool = False) -> jax.Array:
    """`a @ b`, either transposed, of two tiles in float32; float32 operands keep full precision."""
    exact = a.dtype == jnp.float32
    return lax.dot_general(
        a,
        b,
        (((0 if trans_a else 1,), (1 if trans_b else 0,)), ((), ())),
        precision=lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )


def load_rows(
    arena_ref, rows: jax.Array, lanes: jax.Array, inside: jax.Array | None, dtype, is_fp8: bool
) -> tuple[jax.Array, ...]:
    """Tile `[rows, lanes]` of a `[rows, elements]` view of the arena, zero outside; uint16 holds bfloat16 bits.

    Elements of two 8-bit values give two tiles, the first and the second half of the vectors.
    """
    other = None if inside is None else 0
    loaded = plgpu.load(arena_ref.at[rows[:, None], lanes[None, :]], mask=inside, other=other)
    if is_fp8:
        halves = (loaded & 0xFF).astype(jnp.uint8), (loaded >> 8).astype(jnp.uint8)
        return tuple(lax.bitcast_convert_type(half, FP8).astype(dtype) for half in halves)
    return (lax.bitcast_convert_type(loaded, dtype) if loaded.dtype == jnp.uint16 else loaded,)


def to_arena(vectors: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """What an arena of this dtype holds for these vectors; uint16 holds bfloat16 bits."""
    if dtype == jnp.uint16:
        return lax.bitcast_convert_type(vectors.astype(jnp.bfloat16), jnp.uint16)
    return vectors.astype(dtype)


def from_arena(words: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The vectors that `to_arena` made words of."""
    if words.dtype == jnp.uint16:
        words = lax.bitcast_convert_type(words, jnp.bfloat16)
    return words.astype(dtype)


def dot_pieces(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> jax.Array:
    """`a @ b.T` of two tiles whose columns come in pieces."""
    out = tile_dot(a[0], b[0], trans_b=True)
    for one, other in zip(a[1:], b[1:], strict=True):
        out = out + tile_dot(one, other, trans_b=True)
    return out


def plane_rows(key_row: jax.Array | int, value_row: jax.Array | int) -> jax.Array:
    """int32 `[2]`, the operand that says where a layer's keys and values start in a page."""
    return jnp.stack([jnp.asarray(row, jnp.int32) for row in (key_row, value_row)])


def piece_lanes(piece: int, width: int, lanes: jax.Array) -> jax.Array:
    """Columns of a piece: `width` a piece."""
    return lanes if piece == 0 else piece * width + lanes


def exp2_affine(x: jax.Array, factor: float, offset: jax.Array, *, interpret: bool) -> jax.Array:
    """`2 ** (x * factor - offset)` elementwise, offset broadcast to x: one fused multiply-add and one ex2.

    XLA neither fuses the two nor flushes denormals, which makes six instructions an element of it (FMUL, FADD, FSETP,
    2 FMUL, MUFU): a third of all instructions of the prefill loop.
    """
    if interpret:
        return jnp.exp2(x * factor - offset)
    (bits,) = struct.unpack("<I", struct.pack("<f", factor))
    asm = f"{{ .reg .f32 t; fma.rn.f32 t, $1, 0f{bits:08X}, $2; ex2.approx.ftz.f32 $0, t; }}"
    (result,) = plgpu.elementwise_inline_asm(
        asm,
        args=[x, jnp.broadcast_to(-offset, x.shape)],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
    )
    return result
