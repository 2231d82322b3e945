"""What lies between the fused QKV product and attention, in one pass: head norms, rotation, append to the cache.

x is `[T, (H + 2 K) * D]`, the heads of each token joined as in `heads`. Queries and keys are normalised per head (if
the model does), then rotated in half-split pairs: dimension i with i + D/2. Queries go to an array of their own, keys
and values straight to their place in the arena (layout as in `paged_decode`), which is updated in place. Nothing is
written to page 0, where padding belongs: thousands of tokens would store to the same few lines. Attention that reads
no pages gets the keys in an array of their own as well.

Grid: one program for `rows` (token, head) rows of x, whatever they are; which of q, k, v a row is decides only masks,
so that one token of a small batch still spreads over several multiprocessors, and 8192 tokens of 32 + 16 heads are
12288 programs, which read and write 8 KB each. Their rows belong to one token or two, whose sines stay in L1.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from resin.pallas_kernels.fp8 import check_kernel_arena, pack_fp8, row_elements
from resin.pallas_kernels.heads import HeadSpec, NewTokens, append_heads, turn_heads
from resin.pallas_kernels.tiles import NOWHERE, plane_rows, to_arena

LARGE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class AppendTiles:
    """(Token, head) rows a program, and its warps."""

    rows: int = 8
    num_warps: int = 4


def choose_append_tiles(tokens: int) -> AppendTiles:
    """8 rows of 128 values keep 16-byte accesses for 4 warps and give 6 programs a token of a 32 + 16 head model.

    From `LARGE_TOKENS` on there are programs enough, and 32 rows keep more loads in flight: at 64 registers a thread 8
    programs of 8 KB share a multiprocessor. With 64 rows a thread takes 136 registers, so that 3 programs fit.

    Args:
        tokens: padded tokens T.
    """
    return AppendTiles(rows=32) if tokens >= LARGE_TOKENS else AppendTiles()


def rope_append(
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    arena: jax.Array,
    append_pages: jax.Array,
    append_offsets: jax.Array,
    key_row: jax.Array | int,
    value_row: jax.Array | int,
    *,
    kv_heads: int,
    page_entries: int,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    eps: float = 1e-6,
    fp8_scale: float | None = None,
    with_keys: bool = False,
    tiles: AppendTiles | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Normalises and rotates queries and keys, and appends keys and values to the arena.

    Args:
        x: `[T, H + 2 K, D]`, each KV head with its queries, its key and its value.
        cos, sin: float32 `[T, D / 2]`.
        arena: `[num_pages, page_elements]` in x's dtype, or uint16 that takes bfloat16 bits; updated in place.
        append_pages, append_offsets: int32 `[T]`, page and entry that take each token; nothing is written for page 0.
        key_row, value_row: int32 scalars, rows of D elements from a page's start to the layer's keys and values.
        kv_heads, page_entries: KV heads on this device, entries a page.
        q_norm, k_norm: `[D]` weights of per-head RMSNorms; None for none.
        eps: added to the mean square.
        fp8_scale: keys and values are stored as e4m3 of value / fp8_scale, in rows of D / 2 elements (`fp8`); None
            stores x's dtype.
        with_keys: return the keys, too.
        tiles: overrides the choice of tiles.
        interpret: run the kernel body in Pallas' interpreter.

    Returns:
        Queries `[T, H, D]`, the arena, and keys `[T, K, D]` in x's dtype or None.
    """
    tokens, joined, width = x.shape
    check_kernel_arena(arena.dtype, fp8_scale)
    elements = row_elements(width, arena.dtype, fp8_scale)
    spec = _Spec(
        HeadSpec(
            tokens=tokens,
            heads=joined - 2 * kv_heads,
            kv_heads=kv_heads,
            width=width,
            page_entries=page_entries,
            rows_per_page=arena.shape[1] // elements,
            eps=eps,
            has_norm=q_norm is not None,
            fp8_scale=fp8_scale,
        ),
        with_keys,
        tiles or choose_append_tiles(tokens),
        interpret,
    )
    planes = plane_rows(key_row, value_row)
    new = NewTokens(cos, sin, append_pages, append_offsets, q_norm, k_norm)
    q, rows, *keys = _call(spec, x.reshape(-1, width), new, planes, arena.reshape(-1, elements))
    key = keys[0].reshape(tokens, kv_heads, width) if with_keys else None
    return q.reshape(tokens, -1, width), rows.reshape(arena.shape), key


@dataclass(frozen=True, slots=True)
class _Spec:
    """Everything static about one call."""

    heads: HeadSpec
    with_keys: bool
    tiles: AppendTiles
    interpret: bool


@functools.partial(jax.jit, static_argnums=0)
def _call(spec: _Spec, x, new: NewTokens, planes, arena):
    """The kernel call. Nested jit: the layers of a model trace and lower it once."""
    inputs, heads = [x, *jax.tree.leaves(new), planes, arena], spec.heads
    keys = [jax.ShapeDtypeStruct((heads.tokens * heads.kv_heads, heads.width), x.dtype)] if spec.with_keys else []
    return pl.pallas_call(
        functools.partial(_rope_append_kernel, spec=spec),
        grid=(-(-x.shape[0] // spec.tiles.rows),),
        out_shape=(
            jax.ShapeDtypeStruct((heads.tokens * heads.heads, heads.width), x.dtype),
            jax.ShapeDtypeStruct(arena.shape, arena.dtype),
            *keys,
        ),
        input_output_aliases={len(inputs) - 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=spec.tiles.num_warps, num_stages=1),
        interpret=spec.interpret,
        name="rope_append",
    )(*inputs)


def _rope_append_kernel(x_ref, *refs, spec: _Spec):
    heads, count = spec.heads, 6 if spec.heads.has_norm else 4
    new, planes_ref = NewTokens(*refs[:count]), refs[count]
    q_ref, arena_ref, *key_refs = refs[count + 2 :]  # the arena comes as an input, too
    row = pl.program_id(0) * spec.tiles.rows + jnp.arange(spec.tiles.rows, dtype=jnp.int32)
    lanes = jnp.arange(pl.next_power_of_2(heads.half), dtype=jnp.int32)
    token, head = row // heads.joined, row % heads.joined
    live = token < heads.tokens
    inside = live[:, None] & (lanes < heads.half)[None, :]
    low, high = (
        plgpu.load(x_ref.at[row[:, None], start + lanes[None, :]], mask=inside, other=0) for start in (0, heads.half)
    )
    low, high = halves = turn_heads((low, high), token, head, inside, new, heads)
    is_query = heads.is_query(head)
    is_key = ~is_query & ~heads.is_value(head)
    q_row = jnp.where(live & is_query, token * heads.heads + heads.query_head(head), NOWHERE)
    key_row = jnp.where(live & is_key, token * heads.kv_heads + heads.kv_head(head), NOWHERE)
    for start, value in ((0, low), (heads.half, high)):
        at = start + lanes[None, :]
        plgpu.store(q_ref.at[q_row[:, None], at], value, mask=inside & is_query[:, None])
        for key_ref in key_refs:
            plgpu.store(key_ref.at[key_row[:, None], at], value, mask=inside & is_key[:, None])
    append_heads(arena_ref, halves, token, head, inside, new, planes_ref, heads)


def append_rows(
    arena: jax.Array,
    vectors: jax.Array,
    append_pages: jax.Array,
    append_offsets: jax.Array,
    first_row: jax.Array | int,
    *,
    page_entries: int,
    fp8_scale: float | None = None,
) -> jax.Array:
    """The append alone, in plain XLA: one scatter, which writes to page 0 as well.

    Args:
        arena, append_pages, append_offsets, page_entries, fp8_scale: as in `rope_append`; the arena in any dtype.
        vectors: `[T, R, D]`.
        first_row: int32 scalar, rows of D elements from a page's start to the first of the R.

    Returns:
        The arena.
    """
    rows, width = vectors.shape[1:]
    elements = row_elements(width, arena.dtype, fp8_scale)
    starts = append_pages * (arena.shape[1] // elements) + append_offsets
    index = starts[:, None] + (first_row + page_entries * jnp.arange(rows, dtype=jnp.int32))[None, :]
    words = to_arena(vectors, arena.dtype) if fp8_scale is None else pack_fp8(vectors, arena.dtype, fp8_scale)
    return arena.reshape(-1, elements).at[index].set(words, mode="promise_in_bounds").reshape(arena.shape)
