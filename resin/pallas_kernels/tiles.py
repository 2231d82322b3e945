"""What kernel bodies share: tile products, loads of cache rows, constants of the online softmax."""

from __future__ import annotations

import math
import struct

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

MASKED = -1e30  # a masked score; finite, so that a fully masked block gives weights that a later correction zeroes
LOG2E = math.log2(math.e)
MIN_ROWS = 16  # rows of the smallest tensor-core product


def tile_dot(a: jax.Array, b: jax.Array, *, trans_b: bool = False) -> jax.Array:
    """`a @ b` or `a @ b.T` of two tiles in float32; float32 operands keep full precision."""
    exact = a.dtype == jnp.float32
    return lax.dot_general(
        a,
        b,
        (((1,), (1 if trans_b else 0,)), ((), ())),
        precision=lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )


def load_rows(arena_ref, rows: jax.Array, lanes: jax.Array, inside: jax.Array | None, dtype) -> jax.Array:
    """Tile `[rows, lanes]` of a `[rows, width]` view of the arena, zero outside; uint16 holds bfloat16 bits."""
    other = None if inside is None else 0
    loaded = plgpu.load(arena_ref.at[rows[:, None], lanes[None, :]], mask=inside, other=other)
    return lax.bitcast_convert_type(loaded, dtype) if loaded.dtype == jnp.uint16 else loaded


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
