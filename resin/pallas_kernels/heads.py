"""The end of a QKV product of few rows: head norms, rotation, queries out, keys and values to the cache.

A program of the product holds one head of every row, as two tiles: dimensions [0, D/2) and [D/2, D), the halves that a
rotation pairs. So what `rope_append` does needs no kernel of its own there.
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
    """What becomes of the heads of M tokens.

    Attributes:
        cos, sin: float32 `[M, D / 2]`.
        append_pages, append_offsets: int32 `[M]`, page and entry that take each token; page 0 takes nothing.
        q_norm, k_norm: `[D]` weights of per-head RMSNorms; None for none.
    """

    cos: Any
    sin: Any
    append_pages: Any
    append_offsets: Any
    q_norm: Any = None
    k_norm: Any = None


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Everything static about the heads of one product."""

    heads: int  # queries
    kv_heads: int
    width: int  # D
    page_entries: int
    rows_per_page: int
    eps: float
    has_norm: bool
    fp8_scale: float | None

    @property
    def half(self) -> int:
        return self.width // 2

    @property
    def joined(self) -> int:
        """Query, key and value heads."""
        return self.heads + 2 * self.kv_heads


def finish_head(
    halves: list[jax.Array], head, rows: int, new: NewTokens, planes_ref, q_ref, arena_ref, spec: HeadSpec
) -> None:
    """Normalises, rotates and stores one head of every row.

    Args:
        halves: two float32 tiles `[row tile, columns]`, of which `rows` and D / 2 are real.
        head: which of the joined heads, a scalar.
        rows: tokens M.
        new: references.
        planes_ref: rows of a page where the layer's keys and its values start.
        q_ref: `[M, H, D]`.
        arena_ref: `[rows, elements]`.
        spec: of the heads.
    """
    row = jnp.arange(halves[0].shape[0], dtype=jnp.int32)
    lane = jnp.arange(halves[0].shape[1], dtype=jnp.int32)
    held, real = lane < spec.half, row < rows
    inside = real[:, None] & held[None, :]
    is_query, is_value = head < spec.heads, head >= spec.heads + spec.kv_heads
    dtype = q_ref.dtype
    low, high = plain = [half.astype(dtype) for half in halves]
    if spec.has_norm:
        low, high = _normalise(plain, is_query, held, lane, new, spec)
    turn = row[:, None], lane[None, :]
    cos, sin = (plgpu.load(ref.at[turn], mask=inside, other=0.0) for ref in (new.cos, new.sin))
    wide_low, wide_high = low.astype(jnp.float32), high.astype(jnp.float32)
    turned = wide_low * cos - wide_high * sin, wide_high * cos + wide_low * sin
    low, high = (jnp.where(is_value, old, value.astype(dtype)) for old, value in zip(plain, turned, strict=True))
    for start, value in ((0, low), (spec.half, high)):
        plgpu.store(q_ref.at[row[:, None], head, start + lane[None, :]], value, mask=inside & is_query)
    page = plgpu.load(new.append_pages.at[row], mask=real, other=0)
    offset = plgpu.load(new.append_offsets.at[row], mask=real, other=0)
    plane = jnp.where(is_value, planes_ref[1], planes_ref[0])
    kv_head = jnp.where(is_value, head - spec.heads - spec.kv_heads, head - spec.heads)
    place = page * spec.rows_per_page + plane + kv_head * spec.page_entries + offset
    kept = inside & (page != 0)[:, None] & (head >= spec.heads)
    if spec.fp8_scale is not None:
        bits = [lax.bitcast_convert_type(round_fp8(half, spec.fp8_scale), jnp.uint8) for half in (low, high)]
        words = bits[0].astype(jnp.uint16) | (bits[1].astype(jnp.uint16) << 8)
        plgpu.store(arena_ref.at[place[:, None], lane[None, :]], words, mask=kept)
        return
    for start, value in ((0, low), (spec.half, high)):
        if arena_ref.dtype == jnp.uint16:
            value = lax.bitcast_convert_type(value, jnp.uint16)
        at = place[:, None], start + lane[None, :]
        plgpu.store(arena_ref.at[at], value.astype(arena_ref.dtype), mask=kept)


def _normalise(halves: list[jax.Array], is_query, held, lane, new: NewTokens, spec: HeadSpec) -> list[jax.Array]:
    """RMSNorm over the head."""
    wide = [half.astype(jnp.float32) for half in halves]
    squares = sum(jnp.sum(half * half, axis=1) for half in wide)
    factor = lax.rsqrt(squares / spec.width + spec.eps)[:, None]
    out = []
    for start, half in ((0, wide[0]), (spec.half, wide[1])):
        q_weight, k_weight = (plgpu.load(ref.at[start + lane], mask=held, other=0) for ref in (new.q_norm, new.k_norm))
        out.append((half * factor).astype(halves[0].dtype) * jnp.where(is_query, q_weight, k_weight)[None, :])
    return out
