"""The QKV product of few rows (M <= 64) that turns and appends its heads: `dense_body` and `heads` in one kernel.

A program makes one head of every row: it reads the two halves of the head's columns, so that a rotation pairs its
registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from resin.pallas_kernels.dense_body import ColumnBlock, Operands, ProductSpec, add_bias, run_product
from resin.pallas_kernels.dense_tiles import DenseTiles, choose_head_tiles
from resin.pallas_kernels.fp8 import check_kernel_arena, row_elements
from resin.pallas_kernels.gpu import H200, Gpu
from resin.pallas_kernels.heads import HeadSpec, NewTokens, append_heads, turn_heads
from resin.pallas_kernels.tiles import plane_rows


def project_heads(
    x: jax.Array,
    weight: jax.Array,
    new: NewTokens,
    arena: jax.Array,
    key_row: jax.Array | int,
    value_row: jax.Array | int,
    *,
    heads: int,
    kv_heads: int,
    page_entries: int,
    norm: jax.Array | None = None,
    eps: float = 1e-6,
    bias: jax.Array | None = None,
    head_eps: float = 1e-6,
    fp8_scale: float | None = None,
    counters: jax.Array | None = None,
    gpu: Gpu = H200,
    tiles: DenseTiles | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """`rope_append(rmsnorm(x) @ weight + bias)` for at most 64 rows, in one kernel.

    Args:
        x: `[M, hidden]`.
        weight: `[hidden, (H + 2 K) * D]` in x's dtype, each KV head with its queries, its key and its value.
        new: how heads are normalised and rotated, and where keys and values go.
        arena: `[num_pages, page_elements]` in x's dtype, or uint16 that takes bfloat16 bits; updated in place.
        key_row, value_row: int32 scalars, rows of D elements from a page's start to the layer's keys and values.
        heads, kv_heads, page_entries: H and K on this device, entries a page.
        norm, eps, bias, counters, gpu, tiles, interpret: as in `dense_small`; a tile has the columns of half a head.
        head_eps: of the head norms.
        fp8_scale: as in `rope_append`.

    Returns:
        Queries `[M, H, D]`, the arena and the counters.
    """
    rows, inner = x.shape
    joined = heads + 2 * kv_heads
    width = weight.shape[1] // joined
    check_kernel_arena(arena.dtype, fp8_scale)
    elements = row_elements(width, arena.dtype, fp8_scale)
    spec = _Spec(
        rows=rows,
        inner=inner,
        columns=weight.shape[1],
        has_norm=norm is not None,
        eps=eps,
        heads=HeadSpec(
            tokens=rows,
            heads=heads,
            kv_heads=kv_heads,
            width=width,
            page_entries=page_entries,
            rows_per_page=arena.shape[1] // elements,
            eps=head_eps,
            has_norm=new.q_norm is not None,
            fp8_scale=fp8_scale,
        ),
        tiles=tiles or choose_head_tiles(rows, inner, joined, width, gpu),
        interpret=interpret,
    )
    shape = jax.ShapeDtypeStruct((rows, heads, width), x.dtype)
    extras = new, plane_rows(key_row, value_row), bias
    operands = Operands(x, weight, norm, extras, arena.reshape(-1, elements))
    (q, held), counters = run_product(spec, _finish, (shape,), operands, counters)
    return q, held.reshape(arena.shape), counters


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spec(ProductSpec):
    heads: HeadSpec

    @property
    def name(self) -> str:
        return "project_heads"

    @property
    def parts(self) -> int:
        """The halves of a head."""
        return 2

    @property
    def part_stride(self) -> int:
        return self.heads.half

    @property
    def column_blocks(self) -> int:
        return self.heads.joined

    def block(self, index: jax.Array) -> ColumnBlock:
        """Columns of a head's first half."""
        lane = jnp.arange(self.tiles.block_columns, dtype=jnp.int32)
        column = index * self.heads.width + lane
        return ColumnBlock(index, column, None if self.heads.half == lane.shape[0] else lane < self.heads.half)


def _finish(spec: _Spec, block: ColumnBlock, sums, operands: Operands, results) -> None:
    """One head of every row: norm, rotation, store."""
    (q_ref, arena_ref), (new, planes_ref, bias_ref), heads = results, operands.extras, spec.heads
    if bias_ref is not None:
        sums = add_bias(sums, bias_ref, block, spec)
    token = jnp.arange(sums[0].shape[0], dtype=jnp.int32)
    lanes = jnp.arange(sums[0].shape[1], dtype=jnp.int32)
    head = jnp.full_like(token, block.number)
    inside = (token < heads.tokens)[:, None] & (lanes < heads.half)[None, :]
    low, high = (half.astype(q_ref.dtype) for half in sums)
    low, high = halves = turn_heads((low, high), token, head, inside, new, heads)
    asked, query = inside & heads.is_query(block.number), heads.query_head(block.number)
    for start, value in ((0, low), (heads.half, high)):
        plgpu.store(q_ref.at[token[:, None], query, start + lanes[None, :]], value, mask=asked)
    append_heads(arena_ref, halves, token, head, inside, new, planes_ref, heads)
