"""The token that a decode step adds: head norms, rotation and append to the cache, inside the attention kernel.

The QKV product's row of a sequence is `[H + 2 K, D]`: queries, keys, values. Queries and keys are normalised per head
(if the model does), then rotated in half-split pairs, dimension i with i + D/2. Every program of a KV head turns the
queries of its group; the one that owns the new token also turns the key, attends to it from registers and writes key
and value to the arena, where no other program of this launch reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from resin.pallas_kernels.fp8 import round_fp8


class NewTokens(NamedTuple):
    """What the kernel needs to make queries, keys and values of the QKV product.

    Attributes:
        cos, sin: float32 `[B, D / 2]`.
        append_pages, append_offsets: int32 `[B]`, page and entry that take each sequence's token.
        q_norm, k_norm: `[D]` weights of per-head RMSNorms; None for none.
    """

    cos: Any
    sin: Any
    append_pages: Any
    append_offsets: Any
    q_norm: Any = None
    k_norm: Any = None


@dataclass(frozen=True, slots=True)
class NewSpec:
    """Everything static about the new tokens of one call."""

    heads: int  # queries
    kv_heads: int
    width: int  # of a head
    eps: float
    has_norm: bool
    fp8_scale: float | None


def load_turned(
    joined_ref, new: NewTokens, norm_ref, sequence, heads: jax.Array, lanes: list[jax.Array], inside, spec: NewSpec
) -> tuple[jax.Array, ...]:
    """Normalised and rotated vectors of some heads of one sequence, `[rows, columns]` for each piece's lanes."""
    half = spec.width // 2
    pairs = [(at, jnp.where(at < half, at + half, at - half)) for at in lanes]
    loaded = [[load_heads(joined_ref, sequence, heads, at, inside) for at in pair] for pair in pairs]
    if norm_ref is not None:
        squares = sum(jnp.sum(jnp.square(own.astype(jnp.float32)), axis=1) for own, _ in loaded)
        factor = lax.rsqrt(squares / spec.width + spec.eps)[:, None]
    turned = []
    for (own_lanes, other_lanes), (own, other) in zip(pairs, loaded, strict=True):
        dtype = own.dtype
        if norm_ref is not None:
            own, other = (
                (value.astype(jnp.float32) * factor).astype(dtype)
                * plgpu.load(norm_ref.at[at], mask=at < spec.width, other=0)[None, :]
                for at, value in ((own_lanes, own), (other_lanes, other))
            )
        place = jnp.where(own_lanes < half, own_lanes, own_lanes - half)
        held = own_lanes < spec.width
        cos, sin = (plgpu.load(ref.at[sequence, place], mask=held, other=0.0) for ref in (new.cos, new.sin))
        sin = jnp.where(own_lanes < half, -sin, sin)
        value = own.astype(jnp.float32) * cos[None, :] + other.astype(jnp.float32) * sin[None, :]
        turned.append(value.astype(dtype))
    return tuple(turned)


def load_heads(joined_ref, sequence, heads: jax.Array, lanes: jax.Array, inside) -> jax.Array:
    """Vectors of some heads as the product left them, `[rows, columns]`."""
    return plgpu.load(joined_ref.at[sequence, heads[:, None], lanes[None, :]], mask=inside, other=0)


def stored_pieces(pieces: tuple[jax.Array, ...], spec: NewSpec) -> tuple[jax.Array, ...]:
    """The pieces as a later step reads them back: of 8-bit caches rounded, without their scale."""
    if spec.fp8_scale is None:
        return pieces
    return tuple(round_fp8(piece, spec.fp8_scale).astype(piece.dtype) for piece in pieces)


def append_vectors(arena_ref, rows: jax.Array, lanes: jax.Array, inside, pieces, spec: NewSpec) -> None:
    """Writes `[rows, columns]` pieces of vectors to rows of the arena."""
    if spec.fp8_scale is None:
        (words,) = pieces
        if arena_ref.dtype == jnp.uint16:
            words = lax.bitcast_convert_type(words, jnp.uint16)
    else:
        bits = [lax.bitcast_convert_type(round_fp8(piece, spec.fp8_scale), jnp.uint8) for piece in pieces]
        words = bits[0].astype(jnp.uint16) | (bits[1].astype(jnp.uint16) << 8)
    plgpu.store(arena_ref.at[rows[:, None], lanes[None, :]], words.astype(arena_ref.dtype), mask=inside)
