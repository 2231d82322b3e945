"""Dense products of few rows (M <= 128) with a normalisation before and an activation or residual after.

y = f(rmsnorm(x) @ W) or residual + rmsnorm(x) @ W, with W `[K, N]` read once. The norm costs no pass of its own:
rmsnorm(x) @ W = ((x * g) @ W) / rms(x), so each program scales x by g on the way in, sums x^2 beside the product, and
divides at the end. A gated pair reads the gate columns `[:, :N/2]` and the up columns `[:, N/2:]` of one fused weight
in the same program. A QKV product (`project_heads`) reads the two halves of one head, and ends as `heads` says.

One or two rows may run on the vector units: a program then keeps `[block_inner, block_columns]` float32 sums a row
and adds them up once at the end, so that all its loads are in flight at once. Otherwise tensor cores work on 16 rows at
least.

Grid: (N / block_columns, splits). Such products are bound by the bytes of W: narrow column blocks spread W over all
multiprocessors, and the pipeline keeps `num_stages` tiles of it in flight. Where even narrow blocks leave
multiprocessors idle, K is split and the last program to arrive (an atomic count for each column block) adds the parts
up in a fixed order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from resin.pallas_kernels.dense_tiles import DenseTiles, choose_dense_tiles, choose_head_tiles
from resin.pallas_kernels.fp8 import check_kernel_arena, row_elements
from resin.pallas_kernels.heads import HeadSpec, NewTokens, append_heads, turn_heads
from resin.pallas_kernels.rope_append import rope_append_ref
from resin.pallas_kernels.tiles import MIN_ROWS, plane_rows, tile_dot

Gate = Literal["silu", "gelu_tanh"]


def dense_small(
    x: jax.Array,
    weight: jax.Array,
    *,
    norm: jax.Array | None = None,
    eps: float = 1e-6,
    gate: Gate | None = None,
    residual: jax.Array | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    counters: jax.Array | None = None,
    tiles: DenseTiles | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """`residual + gate(rmsnorm(x) @ weight)` for at most 128 rows.

    Args:
        x: `[M, K]`.
        weight: `[K, N]` in x's dtype; with `gate`, gate columns then up columns.
        norm: `[K]` weight of the RMSNorm before the product; None for no norm.
        eps: added to the mean square.
        gate: activation of the gate half: the result is `activation(gate) * up`, `[M, N / 2]`.
        residual: `[M, N]` added to the result.
        out_dtype: dtype of the result; None for x's.
        counters: int32 zeros, at least one a column block, given back as zeros; None has XLA clear new ones.
        tiles: overrides the choice of tiles.
        interpret: run the kernel body in Pallas' interpreter.

    Returns:
        `[M, N]` or, gated, `[M, N / 2]`, and the counters.
    """
    rows, inner = x.shape
    columns = weight.shape[1] // (2 if gate else 1)
    tiles = tiles or choose_dense_tiles(rows, inner, columns, gated=gate is not None)
    spec = _Spec(
        rows=rows,
        inner=inner,
        columns=columns,
        has_norm=norm is not None,
        eps=eps,
        gate=gate,
        has_residual=residual is not None,
        heads=None,
        tiles=tiles,
        interpret=interpret,
    )
    if tiles.splits > 1 and counters is None:
        counters = jnp.zeros((spec.column_blocks,), jnp.int32)
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    operands = _Operands(x, weight, norm, residual)
    out, _, used = _call(spec, out_dtype, operands, counters if tiles.splits > 1 else None)
    return out, counters if used is None else used


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
    head_eps: float = 1e-6,
    fp8_scale: float | None = None,
    counters: jax.Array | None = None,
    tiles: DenseTiles | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """`rope_append(rmsnorm(x) @ weight)` for at most 64 rows, in one kernel.

    Args:
        x: `[M, hidden]`.
        weight: `[hidden, (H + 2 K) * D]` in x's dtype, query heads, key heads, value heads.
        new: how heads are normalised and rotated, and where keys and values go.
        arena: `[num_pages, page_elements]` in x's dtype, or uint16 that takes bfloat16 bits; updated in place.
        key_row, value_row: int32 scalars, rows of D elements from a page's start to the layer's keys and values.
        heads, kv_heads, page_entries: H and K on this device, entries a page.
        norm, eps, counters, tiles, interpret: as in `dense_small`; a tile's columns are those of half a head.
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
    tiles = tiles or choose_head_tiles(rows, inner, joined, width)
    spec = _Spec(
        rows=rows,
        inner=inner,
        columns=weight.shape[1],
        has_norm=norm is not None,
        eps=eps,
        gate=None,
        has_residual=False,
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
        tiles=tiles,
        interpret=interpret,
    )
    if tiles.splits > 1 and counters is None:
        counters = jnp.zeros((joined,), jnp.int32)
    planes = plane_rows(key_row, value_row)
    operands = _Operands(x, weight, norm, None, new, planes, arena.reshape(-1, elements))
    q, held, used = _call(spec, x.dtype, operands, counters if tiles.splits > 1 else None)
    return q, held.reshape(arena.shape), counters if used is None else used


class _Operands(NamedTuple):
    """Arrays of a call, in the kernel's order; the counters follow."""

    x: Any
    weight: Any
    norm: Any = None
    residual: Any = None
    new: NewTokens | None = None
    planes: Any = None
    arena: Any = None


@functools.partial(jax.jit, static_argnums=(0, 1))
def _call(spec: _Spec, out_dtype, operands: _Operands, counters: jax.Array | None):
    """The kernel call: result, arena if it changes, counters. Nested jit: a model's layers trace and lower it once."""
    inputs = [*jax.tree.leaves(operands), *([] if counters is None else [counters])]
    shape = (spec.rows, spec.columns) if spec.heads is None else (spec.rows, spec.heads.heads, spec.heads.width)
    outputs, aliases = [jax.ShapeDtypeStruct(shape, out_dtype)], {}
    if counters is not None:
        aliases[len(inputs) - 1] = 3
        outputs += [
            jax.ShapeDtypeStruct((spec.tiles.splits, spec.parts, spec.row_tile, spec.columns), jnp.float32),
            jax.ShapeDtypeStruct((spec.tiles.splits, spec.column_blocks, spec.row_tile), jnp.float32),
            jax.ShapeDtypeStruct(counters.shape, jnp.int32),
        ]
    if spec.heads is not None:
        aliases[len(inputs) - (1 if counters is None else 2)] = len(outputs)
        outputs.append(jax.ShapeDtypeStruct(operands.arena.shape, operands.arena.dtype))
    results = pl.pallas_call(
        functools.partial(_dense_kernel, spec=spec),
        grid=(spec.column_blocks, spec.tiles.splits),
        out_shape=outputs,
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(num_warps=spec.tiles.num_warps, num_stages=spec.tiles.num_stages),
        interpret=spec.interpret,
        name="dense_small",
    )(*inputs)
    return results[0], None if spec.heads is None else results[-1], None if counters is None else results[3]


@dataclass(frozen=True, slots=True)
class _Spec:
    """Everything static about one call."""

    rows: int
    inner: int
    columns: int
    has_norm: bool
    eps: float
    gate: Gate | None
    has_residual: bool
    heads: HeadSpec | None
    tiles: DenseTiles
    interpret: bool

    @property
    def row_tile(self) -> int:
        if self.tiles.vector:
            return pl.next_power_of_2(self.rows)
        return max(MIN_ROWS, pl.next_power_of_2(self.rows))

    @property
    def whole(self) -> bool:
        """True if the steps of all splits cover K exactly."""
        return self.inner % (self.tiles.block_inner * self.tiles.splits) == 0

    @property
    def parts(self) -> int:
        """Products a program makes: gate and up, the halves of a head, or one."""
        return 2 if self.gate or self.heads else 1

    @property
    def part_stride(self) -> int:
        """Columns of the weight from one part to the next."""
        return self.columns if self.heads is None else self.heads.half

    @property
    def column_blocks(self) -> int:
        return -(-self.columns // self.tiles.block_columns) if self.heads is None else self.heads.joined

    def block(self, index) -> tuple[jax.Array, jax.Array | None]:
        """Columns of a block's first part, and which are real if not all are."""
        lane = jnp.arange(self.tiles.block_columns, dtype=jnp.int32)
        if self.heads is not None:
            return index * self.heads.width + lane, None if self.heads.half == lane.shape[0] else lane < self.heads.half
        column = index * self.tiles.block_columns + lane
        return column, None if self.columns % self.tiles.block_columns == 0 else column < self.columns


def _dense_kernel(x_ref, weight_ref, *refs, spec: _Spec):
    rest = list(refs)
    norm_ref = rest.pop(0) if spec.has_norm else None
    residual_ref = rest.pop(0) if spec.has_residual else None
    if spec.heads is not None:
        new = NewTokens(*(rest.pop(0) for _ in range(6 if spec.heads.has_norm else 4)))
        planes_ref = rest.pop(0)
    # Counters and arena come as inputs too, aliased to outputs.
    outputs = rest[(spec.tiles.splits > 1) + (spec.heads is not None) :]
    index, split = pl.program_id(0), pl.program_id(1)
    column, real = spec.block(index)
    steps = pl.cdiv(pl.cdiv(spec.inner, spec.tiles.block_inner), spec.tiles.splits)
    product = _vector_product if spec.tiles.vector else _matrix_product
    squares, *sums = product(x_ref, weight_ref, norm_ref, (column, real), split * steps, steps, spec)

    def finish(squares, sums):
        if spec.has_norm:
            factor = lax.rsqrt(squares / spec.inner + spec.eps)[:, None]
            sums = [total * factor for total in sums]
        if spec.heads is None:
            _finish(outputs[0], residual_ref, column, real, sums, spec)
        else:
            _finish_head(outputs[0], outputs[-1], new, planes_ref, index, sums, spec.heads)

    if spec.tiles.splits == 1:
        finish(squares, sums)
        return
    parts_ref, squares_ref, counter_ref = outputs[1:4]
    row = jnp.arange(spec.row_tile, dtype=jnp.int32)
    inside = (row >= 0)[:, None] & ((column >= 0) if real is None else real)[None, :]
    for part, total in enumerate(sums):
        plgpu.store(parts_ref.at[split, part, row[:, None], column[None, :]], total, mask=inside)
    plgpu.store(squares_ref.at[split, index, row], squares)
    if not spec.interpret:
        plgpu.debug_barrier()  # every thread's parts come before the count
    arrived = plgpu.atomic_add(counter_ref, (index,), jnp.minimum(split + 1, 1))

    @pl.when(arrived == spec.tiles.splits - 1)
    def _():
        def add(share, carry):
            squares, *sums = carry
            squares = squares + plgpu.load(squares_ref.at[share, index, row])
            parts = [
                plgpu.load(parts_ref.at[share, part, row[:, None], column[None, :]], mask=inside, other=0.0)
                for part in range(spec.parts)
            ]
            return squares, *(total + part for total, part in zip(sums, parts, strict=True))

        zeros = (jnp.zeros_like(squares), *(jnp.zeros_like(total) for total in sums))
        all_squares, *all_sums = lax.fori_loop(0, spec.tiles.splits, add, zeros)
        finish(all_squares, all_sums)
        counter_ref[index] = 0


def _matrix_product(x_ref, weight_ref, norm_ref, column, first_step, steps, spec: _Spec):
    """Sums of squares `[row_tile]` and one `[row_tile, block_columns]` product a part."""
    walk = functools.partial(_matrix_step, x_ref, weight_ref, norm_ref, column, first_step, spec)
    shape = (spec.row_tile, spec.tiles.block_columns)
    zeros = [jnp.zeros(shape[::-1] if spec.tiles.transposed else shape, jnp.float32)] * spec.parts
    squares, *sums = lax.fori_loop(0, steps, walk, (jnp.zeros((spec.row_tile,), jnp.float32), *zeros))
    return squares, *(total.T if spec.tiles.transposed else total for total in sums)


def _vector_product(x_ref, weight_ref, norm_ref, column, first_step, steps, spec: _Spec):
    """The same on the vector units."""
    shape = (spec.tiles.block_inner, spec.tiles.block_columns)
    walk = functools.partial(_vector_step, x_ref, weight_ref, norm_ref, column, first_step, spec)
    zeros = [jnp.zeros(shape, jnp.float32)] * (spec.rows * spec.parts)
    carry = lax.fori_loop(0, steps, walk, ([jnp.zeros(shape[:1], jnp.float32)] * spec.rows, zeros))
    squares, sums = carry
    row = jnp.arange(spec.row_tile, dtype=jnp.int32)
    all_squares = jnp.zeros((spec.row_tile,), jnp.float32)
    parts = [jnp.zeros((spec.row_tile, spec.tiles.block_columns), jnp.float32)] * spec.parts
    for m in range(spec.rows):
        all_squares = jnp.where(row == m, jnp.sum(squares[m]), all_squares)
        for part in range(spec.parts):
            total = jnp.sum(sums[m * spec.parts + part], axis=0)
            parts[part] = jnp.where((row == m)[:, None], total[None, :], parts[part])
    return all_squares, *parts


def _vector_step(x_ref, weight_ref, norm_ref, column, first_step, spec: _Spec, index, carry):
    squares, sums = (list(values) for values in carry)
    inner = (first_step + index) * spec.tiles.block_inner + jnp.arange(spec.tiles.block_inner, dtype=jnp.int32)
    weights = [weight.astype(jnp.float32) for weight in _load_weights(weight_ref, inner, column, spec)]
    held = None if spec.whole else inner < spec.inner
    other = None if spec.whole else 0
    if norm_ref is not None:
        scale = plgpu.load(norm_ref.at[inner], mask=held, other=other).astype(jnp.float32)
    for m in range(spec.rows):
        x = plgpu.load(x_ref.at[m, inner], mask=held, other=other).astype(jnp.float32)
        if norm_ref is not None:
            squares[m] = squares[m] + x * x
            x = (x * scale).astype(x_ref.dtype).astype(jnp.float32)
        for part, weight in enumerate(weights):
            place = m * spec.parts + part
            sums[place] = sums[place] + x[:, None] * weight
    return squares, sums


def _load_weights(weight_ref, inner, column, spec: _Spec) -> list[jax.Array]:
    """The weight tile of each part."""
    column, real = column
    mask = other = None
    if not spec.whole or real is not None:
        mask, other = (inner < spec.inner)[:, None] & ((column >= 0) if real is None else real)[None, :], 0
    starts = [part * spec.part_stride for part in range(spec.parts)]
    return [
        plgpu.load(weight_ref.at[inner[:, None], start + column[None, :]], mask=mask, other=other) for start in starts
    ]


def _matrix_step(x_ref, weight_ref, norm_ref, column, first_step, spec: _Spec, index, carry):
    """Adds one `[row_tile, block_inner] @ [block_inner, block_columns]` product a part."""
    squares, *sums = carry
    row = jnp.arange(spec.row_tile, dtype=jnp.int32)
    inner = (first_step + index) * spec.tiles.block_inner + jnp.arange(spec.tiles.block_inner, dtype=jnp.int32)
    held = jnp.full(inner.shape, True) if spec.whole else inner < spec.inner
    x = plgpu.load(x_ref.at[row[:, None], inner[None, :]], mask=(row < spec.rows)[:, None] & held[None, :], other=0)
    if norm_ref is not None:
        wide = x.astype(jnp.float32)
        squares = squares + jnp.sum(wide * wide, axis=1)
        scale = plgpu.load(norm_ref.at[inner], mask=held, other=0).astype(jnp.float32)
        x = (wide * scale[None, :]).astype(x.dtype)
    for part, weight in enumerate(_load_weights(weight_ref, inner, column, spec)):
        product = tile_dot(weight, x, trans_a=True, trans_b=True) if spec.tiles.transposed else tile_dot(x, weight)
        sums[part] = sums[part] + product
    return squares, *sums


def _finish(out_ref, residual_ref, column, real, sums, spec: _Spec) -> None:
    """Activation, residual, store."""
    out = sums[0]
    if spec.gate is not None:
        out = activate(spec.gate, out) * sums[1]
    row = jnp.arange(spec.row_tile, dtype=jnp.int32)
    inside = (row < spec.rows)[:, None] & ((column >= 0) if real is None else real)[None, :]
    at = (row[:, None], column[None, :])
    if residual_ref is not None:
        out = out + plgpu.load(residual_ref.at[at], mask=inside, other=0).astype(jnp.float32)
    plgpu.store(out_ref.at[at], out.astype(out_ref.dtype), mask=inside)


def _finish_head(q_ref, arena_ref, new: NewTokens, planes_ref, index, sums, spec: HeadSpec) -> None:
    """One head of every row: norm, rotation, store."""
    token = jnp.arange(sums[0].shape[0], dtype=jnp.int32)
    lanes = jnp.arange(sums[0].shape[1], dtype=jnp.int32)
    head = jnp.full_like(token, index)
    inside = (token < spec.tokens)[:, None] & (lanes < spec.half)[None, :]
    low, high = (half.astype(q_ref.dtype) for half in sums)
    low, high = halves = turn_heads((low, high), token, head, inside, new, spec)
    for start, value in ((0, low), (spec.half, high)):
        plgpu.store(q_ref.at[token[:, None], index, start + lanes[None, :]], value, mask=inside & spec.is_query(index))
    append_heads(arena_ref, halves, token, head, inside, new, planes_ref, spec)


def activate(gate: Gate, x: jax.Array) -> jax.Array:
    """The named activation."""
    if gate == "silu":
        return x / (1.0 + jnp.exp(-x))
    return 0.5 * x * (1.0 + jnp.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


def dense_small_ref(
    x: jax.Array,
    weight: jax.Array,
    *,
    norm: jax.Array | None = None,
    eps: float = 1e-6,
    gate: Gate | None = None,
    residual: jax.Array | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    counters: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """The same function in plain XLA: float32 sums, x normalised in x's dtype. Arguments as in `dense_small`."""
    out_dtype = out_dtype or x.dtype
    if norm is not None:
        wide = x.astype(jnp.float32)
        wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
        x = (wide * norm.astype(jnp.float32)[None, :]).astype(x.dtype)
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out = jnp.dot(x, weight, precision=exact, preferred_element_type=jnp.float32)
    if gate is not None:
        first, second = jnp.split(out, 2, axis=-1)
        out = activate(gate, first) * second
    if residual is not None:
        out = out + residual.astype(jnp.float32)
    return out.astype(out_dtype), counters


def project_heads_ref(
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
    head_eps: float = 1e-6,
    fp8_scale: float | None = None,
    counters: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The same function in plain XLA, one after the other. Arguments as in `project_heads`."""
    joined, _ = dense_small_ref(x, weight, norm=norm, eps=eps)
    joined = joined.reshape(x.shape[0], heads + 2 * kv_heads, -1)
    q, arena, *_ = rope_append_ref(
        joined,
        new.cos,
        new.sin,
        arena,
        new.append_pages,
        new.append_offsets,
        key_row,
        value_row,
        kv_heads=kv_heads,
        page_entries=page_entries,
        q_norm=new.q_norm,
        k_norm=new.k_norm,
        eps=head_eps,
        fp8_scale=fp8_scale,
    )
    return q, arena, counters
