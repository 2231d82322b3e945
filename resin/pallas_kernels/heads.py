"""What lies between the QKV product and attention, inside a kernel: head norms, rotation, append to the cache.

The heads of a token are joined KV head by KV head, each with its queries, then its key, then its value: so a weight
can be cut over any devices that share the KV heads.

A tile holds one head a row, as two halves: dimensions [0, D/2) and [D/2, D), which a rotation pairs. `rope_append`
reads such rows of any token and head; a program of `project_heads` made them itself, one head of every token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from resin.pallas_kernels.fp8 import round_fp8
from resin.pallas_kernels.norms import weigh
from resin.pallas_kernels.tiles import NOWHERE


class NewTokens(NamedTuple):
    """What becomes of the heads of T tokens.

    Attributes:
        cos, sin: float32 `[T, D / 2]`.
        append_pages, append_offsets: int32 `[T]`, page and entry that take each token; page 0 takes nothing.
        q_norm, k_norm: `[D]` weights of per-head RMSNorms; None for none.
    """

    cos: Any
    sin: Any
    append_pages: Any
    append_offsets: Any
    q_norm: Any = None
    k_norm: Any = None


def split_heads(joined: jax.Array, kv_heads: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries `[T, H, D]`, keys and values `[T, K, D]` of joined heads `[T, H + 2 K, D]`."""
    tokens, count, width = joined.shape
    members = joined.reshape(tokens, kv_heads, count // kv_heads, width)
    return members[:, :, :-2].reshape(tokens, -1, width), members[:, :, -2], members[:, :, -1]


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Everything static about the heads of one call."""

    tokens: int
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

    @property
    def members(self) -> int:
        """Joined heads of a KV head: its queries, its key, its value."""
        return self.heads // self.kv_heads + 2

    def is_query(self, head: jax.Array) -> jax.Array:
        """Which of the joined heads are queries."""
        return head % self.members < self.members - 2

    def is_value(self, head: jax.Array) -> jax.Array:
        """Which of the joined heads are values."""
        return head % self.members == self.members - 1

    def kv_head(self, head: jax.Array) -> jax.Array:
        """The KV head that joined heads belong to."""
        return head // self.members

    def query_head(self, head: jax.Array) -> jax.Array:
        """The place among the queries of joined heads that are queries."""
        return head - 2 * self.kv_head(head)


def turn_heads(
    halves: tuple[jax.Array, jax.Array], token, head, inside, new: NewTokens, spec: HeadSpec
) -> tuple[jax.Array, jax.Array]:
    """Normalises and rotates queries and keys; values stay as they are.

    Args:
        halves: `[rows, lanes]` each.
        token, head: int32 `[rows]`, which token and which of the joined heads a row is.
        inside: bool `[rows, lanes]`, what is real.
        new: references.
        spec: of the heads.
    """
    lanes = jnp.arange(halves[0].shape[1], dtype=jnp.int32)
    is_value = spec.is_value(head)[:, None]
    low, high = halves if not spec.has_norm else _normalise(halves, spec.is_query(head)[:, None], lanes, new, spec)
    at = token[:, None], lanes[None, :]
    cos, sin = (plgpu.load(ref.at[at], mask=inside, other=0.0) for ref in (new.cos, new.sin))
    wide_low, wide_high = low.astype(jnp.float32), high.astype(jnp.float32)
    turned = wide_low * cos - wide_high * sin, wide_high * cos + wide_low * sin
    low, high = (jnp.where(is_value, old, value.astype(old.dtype)) for old, value in zip(halves, turned, strict=True))
    return low, high


def append_heads(
    arena_ref, halves: tuple[jax.Array, jax.Array], token, head, inside, new: NewTokens, planes_ref, spec: HeadSpec
) -> None:
    """Writes the rows that are keys or values to their places in the arena, none to page 0.

    Args:
        arena_ref: `[rows, elements]`.
        planes_ref: rows from a page's start to the layer's keys and to its values.

    The others are those of `turn_heads`.
    """
    lanes, real = jnp.arange(halves[0].shape[1], dtype=jnp.int32), token < spec.tokens
    is_query, is_value = spec.is_query(head), spec.is_value(head)
    page = plgpu.load(new.append_pages.at[token], mask=real, other=0)
    offset = plgpu.load(new.append_offsets.at[token], mask=real, other=0)
    plane = jnp.where(is_value, planes_ref[1], planes_ref[0])
    place = page * spec.rows_per_page + plane + spec.kv_head(head) * spec.page_entries + offset
    kept = real & ~is_query & (page > 0)
    place, kept = jnp.where(kept, place, NOWHERE), inside & kept[:, None]
    if spec.fp8_scale is not None:
        bits = [lax.bitcast_convert_type(round_fp8(half, spec.fp8_scale), jnp.uint8) for half in halves]
        words = bits[0].astype(jnp.uint16) | (bits[1].astype(jnp.uint16) << 8)
        plgpu.store(arena_ref.at[place[:, None], lanes[None, :]], words, mask=kept)
        return
    for start, value in zip((0, spec.half), halves, strict=True):
        if arena_ref.dtype == jnp.uint16:
            value = lax.bitcast_convert_type(value, jnp.uint16)
        at = place[:, None], start + lanes[None, :]
        plgpu.store(arena_ref.at[at], value.astype(arena_ref.dtype), mask=kept)


def _normalise(halves, is_query, lanes, new: NewTokens, spec: HeadSpec) -> tuple[jax.Array, jax.Array]:
    """RMSNorm over each head, with the weights of queries or of keys."""
    wide = [half.astype(jnp.float32) for half in halves]
    squares = sum(jnp.sum(half * half, axis=1) for half in wide)
    factor = lax.rsqrt(squares / spec.width + spec.eps)[:, None]
    out = []
    for start, half in zip((0, spec.half), wide, strict=True):
        weights = [
            plgpu.load(ref.at[start + lanes], mask=lanes < spec.half, other=0)[None, :]
            for ref in (new.q_norm, new.k_norm)
        ]
        out.append(weigh(half * factor, jnp.where(is_query, weights[0], weights[1]), halves[0].dtype))
    return out[0], out[1]
