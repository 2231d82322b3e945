"""Vectors of 8-bit floats (e4m3) in an arena of wider elements.

A vector of D values takes D / n elements of n bytes. Byte p of element j, the least significant first, is value
`p * D / n + j`: each byte place holds one contiguous piece of the vector. So a kernel splits a tile of elements into
pieces of the vector without moving anything between lanes, and with two bytes an element the pieces are the halves
that a rotation pairs. The elements are bits: nothing may convert them, which is why arenas of 16-bit elements that hold
such vectors are uint16, not bfloat16, whose scatters some backends run through float32.

Values are stored as `value / scale`, rounded to nearest even and held within +-448; NaN stays NaN.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from resin.plan import InvalidRequest

FP8 = jnp.float8_e4m3fn
FP8_MAX = 448.0
PIECES = 2  # of a vector in the 16-bit elements that kernels read


def pack_fp8(values: jax.Array, dtype: jax.typing.DTypeLike, scale: float) -> jax.Array:
    """`[..., D]` values as `[..., D / n]` arena elements of n bytes.

    Raises:
        InvalidRequest: n does not divide D.
    """
    count = vector_pieces(values.shape[-1], dtype)
    word = jnp.dtype(f"uint{8 * count}")
    bits = lax.bitcast_convert_type(round_fp8(values, scale), jnp.uint8).astype(word)
    pieces = jnp.split(bits, count, axis=-1)
    words = pieces[0]
    for place, piece in enumerate(pieces[1:], start=1):
        words = words | (piece << jnp.asarray(8 * place, word))
    return words if word == dtype else lax.bitcast_convert_type(words, jnp.dtype(dtype))


def unpack_fp8(elements: jax.Array, scale: float) -> jax.Array:
    """float32 `[..., D]` of `[..., D / n]` arena elements."""
    count = elements.dtype.itemsize
    word = jnp.dtype(f"uint{8 * count}")
    words = elements if elements.dtype == word else lax.bitcast_convert_type(elements, word)
    pieces = [
        ((words >> jnp.asarray(8 * place, word)) & jnp.asarray(0xFF, word)).astype(jnp.uint8) for place in range(count)
    ]
    values = lax.bitcast_convert_type(jnp.concatenate(pieces, axis=-1), FP8).astype(jnp.float32)
    return values * scale


def round_fp8(values: jax.Array, scale: float) -> jax.Array:
    """`values / scale` as e4m3, saturating."""
    wide = values.astype(jnp.float32)
    if scale != 1.0:
        wide = wide * (1 / scale)
    return jnp.minimum(jnp.maximum(wide, -FP8_MAX), FP8_MAX).astype(FP8)


def vector_pieces(width: int, dtype: jax.typing.DTypeLike) -> int:
    """Pieces of a vector of `width` 8-bit values: bytes of an arena element.

    Raises:
        InvalidRequest: the vector is no whole number of elements.
    """
    count = jnp.dtype(dtype).itemsize
    if width % count:
        raise InvalidRequest(
            "width", width, f"a multiple of {count}: 8-bit vectors of whole {jnp.dtype(dtype)} elements"
        )
    return count


def row_elements(width: int, dtype: jax.typing.DTypeLike, scale: float | None) -> int:
    """Arena elements of a vector: 8-bit values, where there is a scale, share them.

    Raises:
        InvalidRequest: the vector is no whole number of elements.
    """
    return width if scale is None else width // vector_pieces(width, dtype)


def check_kernel_arena(dtype: jax.typing.DTypeLike, scale: float | None) -> None:
    """Kernels read 8-bit values two to a uint16 element.

    Raises:
        InvalidRequest: another arena.
    """
    if scale is not None and jnp.dtype(dtype) != jnp.uint16:
        raise InvalidRequest("arena.dtype", str(jnp.dtype(dtype)), "uint16 where kernels read 8-bit values")
