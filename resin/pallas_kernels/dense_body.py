"""The body of every product of few rows: rmsnorm(x) @ W with W `[K, N]` read once, and a `finish` of its own for each.

The norm costs no pass of its own: rmsnorm(x) @ W = ((x * g) @ W) / rms(x), so each program scales x by g on the way in,
sums x^2 beside the product, and divides at the end. A program may make two products of one tile of x (`parts`).

One or two rows may run on the vector units: a program then keeps `[block_inner, block_columns]` float32 sums a row
and adds them up once at the end, so that all its loads are in flight at once. Otherwise tensor cores work on 16 rows at
least.

Grid: (column blocks, splits). Such products are bound by the bytes of W: narrow column blocks spread W over all
multiprocessors, and the pipeline keeps `num_stages` tiles of it in flight. Where even narrow blocks leave
multiprocessors idle, K is split and the last program to arrive (an atomic count for each column block) adds the parts
up in a fixed order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from resin.pallas_kernels.dense_tiles import DenseTiles
from resin.pallas_kernels.tiles import MIN_ROWS, tile_dot


class ColumnBlock(NamedTuple):
    """The columns of one program: their block, `[block_columns]` places in W, and which are real if not all are."""

    number: jax.Array
    column: jax.Array
    real: jax.Array | None

    @property
    def inside(self) -> jax.Array:
        return (self.column >= 0) if self.real is None else self.real


class Operands(NamedTuple):
    """Arrays of a call or, in the kernel, their references; the counters follow."""

    x: Any
    weight: Any
    norm: Any = None
    extras: Any = None  # what the finish reads
    updated: Any = None  # what the finish writes in place


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductSpec:
    """Everything static about one product; kernels add what their finish needs, and say how their columns lie."""

    rows: int
    inner: int
    columns: int
    has_norm: bool
    eps: float
    tiles: DenseTiles
    interpret: bool

    @property
    def name(self) -> str:
        """What profiles call the kernel."""
        raise NotImplementedError

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
        """Products a program makes."""
        return 1

    @property
    def part_stride(self) -> int:
        """Columns of the weight from one part to the next."""
        return self.columns

    @property
    def keeps_norm(self) -> bool:
        """Whether x * g and 1 / rms(x) are results, too; such a product has one column block."""
        return False

    @property
    def part_rows(self) -> int:
        """Rows of the parts that a split hands over."""
        return self.row_tile

    @property
    def shares_at_once(self) -> int:
        """Splits whose parts the last program loads before it adds them; divides the splits."""
        return 1

    @property
    def column_blocks(self) -> int:
        return -(-self.columns // self.tiles.block_columns)

    def block(self, index: jax.Array) -> ColumnBlock:
        """Columns of a block's first part."""
        lane = jnp.arange(self.tiles.block_columns, dtype=jnp.int32)
        column = index * self.tiles.block_columns + lane
        real = None if self.columns % self.tiles.block_columns == 0 else column < self.columns
        return ColumnBlock(index, column, real)


Finish = Callable[[Any, ColumnBlock, list[jax.Array], Operands, Sequence[Any]], None]
"""`finish(spec, block, sums, operands, results)`: what becomes of the float32 `[row_tile, block_columns]` products of a
block, one a part; `results` are references of the results and of what is updated in place."""


def run_product(
    spec: ProductSpec,
    finish: Finish,
    shapes: tuple[jax.ShapeDtypeStruct, ...],
    operands: Operands,
    counters: jax.Array | None,
) -> tuple[list[jax.Array], jax.Array | None]:
    """Calls the kernel.

    Args:
        spec: what is static.
        finish: a function of a module, so that equal calls are traced once.
        shapes: of the results.
        operands: arrays.
        counters: int32 zeros, at least one a column block; None for new ones.

    Returns:
        The results, with `keeps_norm` x * g `[M, K]` and float32 1 / rms(x) `[M]`, then what was updated in place; and
        the counters as zeros.
    """
    if spec.keeps_norm:
        x = operands.x
        shapes = (*shapes, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:1], jnp.float32))
    if spec.tiles.splits == 1:
        return _call(spec, finish, shapes, operands, None)[0], counters
    if counters is None:
        counters = jnp.zeros((spec.column_blocks,), jnp.int32)
    assert counters.shape[0] >= spec.column_blocks, (counters.shape, spec)
    return _call(spec, finish, shapes, operands, counters)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _call(spec: ProductSpec, finish: Finish, shapes, operands: Operands, counters: jax.Array | None):
    """Nested jit: a model's layers trace and lower the kernel once."""
    inputs, structure = jax.tree.flatten((operands, counters))
    outputs, aliases = [*shapes], {}
    if counters is not None:
        aliases[len(inputs) - 1] = len(shapes) + 2
        outputs += [
            jax.ShapeDtypeStruct((spec.tiles.splits, spec.parts, spec.part_rows, spec.columns), jnp.float32),
            jax.ShapeDtypeStruct((spec.tiles.splits, spec.column_blocks, spec.row_tile), jnp.float32),
            jax.ShapeDtypeStruct(counters.shape, jnp.int32),
        ]
    if operands.updated is not None:
        aliases[len(inputs) - (1 if counters is None else 2)] = len(outputs)
        outputs.append(jax.ShapeDtypeStruct(operands.updated.shape, operands.updated.dtype))
    results = pl.pallas_call(
        functools.partial(_kernel, spec=spec, finish=finish, structure=structure, results=len(shapes)),
        grid=(spec.column_blocks, spec.tiles.splits),
        out_shape=outputs,
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(num_warps=spec.tiles.num_warps, num_stages=spec.tiles.num_stages),
        interpret=spec.interpret,
        name=spec.name,
    )(*inputs)
    kept = [*results[: len(shapes)], *([] if operands.updated is None else results[-1:])]
    return kept, None if counters is None else results[len(shapes) + 2]


def _kernel(*refs, spec: ProductSpec, finish: Finish, structure, results: int):
    # Counters and what is updated come as inputs too, aliased to outputs.
    operands = jax.tree.unflatten(structure, refs[: structure.num_leaves])[0]
    outputs = refs[structure.num_leaves :]
    kept = outputs[:results] if operands.updated is None else (*outputs[:results], outputs[-1])
    index, split = pl.program_id(0), pl.program_id(1)
    block = spec.block(index)
    steps = pl.cdiv(pl.cdiv(spec.inner, spec.tiles.block_inner), spec.tiles.splits)
    product = _vector_product if spec.tiles.vector else _matrix_product
    scaled_ref, factor_ref = outputs[results - 2 : results] if spec.keeps_norm else (None, None)
    read = (operands.x, operands.weight, operands.norm, scaled_ref)
    squares, *sums = product(read, block, split * steps, steps, spec)

    def end(squares, sums):
        if spec.has_norm:
            factor = lax.rsqrt(squares / spec.inner + spec.eps)
            sums = [total * factor[:, None] for total in sums]
            if factor_ref is not None:
                place = jnp.arange(spec.row_tile, dtype=jnp.int32)
                plgpu.store(factor_ref.at[place], factor, mask=place < spec.rows)
        finish(spec, block, sums, operands, kept)

    if spec.tiles.splits == 1:
        end(squares, sums)
        return
    parts_ref, squares_ref, counter_ref = outputs[results : results + 3]
    row = jnp.arange(spec.row_tile, dtype=jnp.int32)
    handed = row >= 0 if spec.part_rows == spec.row_tile else row < spec.part_rows
    inside = handed[:, None] & block.inside[None, :]
    at = (row[:, None], block.column[None, :])
    for part, total in enumerate(sums):
        plgpu.store(parts_ref.at[split, part, *at], total, mask=inside)
    plgpu.store(squares_ref.at[split, index, row], squares)
    if not spec.interpret:
        plgpu.debug_barrier()  # every thread's parts come before the count
    arrived = plgpu.atomic_add(counter_ref, (index,), jnp.minimum(split + 1, 1))

    @pl.when(arrived == spec.tiles.splits - 1)
    def _():
        def add(step, totals):
            squares, *sums = totals
            shares = [step * spec.shares_at_once + place for place in range(spec.shares_at_once)]
            for part in [plgpu.load(squares_ref.at[share, index, row]) for share in shares]:
                squares = squares + part
            loaded = [
                [plgpu.load(parts_ref.at[share, part, *at], mask=inside, other=0.0) for part in range(spec.parts)]
                for share in shares
            ]
            for parts in loaded:
                sums = [total + part for total, part in zip(sums, parts, strict=True)]
            return squares, *sums

        zeros = (jnp.zeros_like(squares), *(jnp.zeros_like(total) for total in sums))
        all_squares, *all_sums = lax.fori_loop(0, spec.tiles.splits // spec.shares_at_once, add, zeros)
        end(all_squares, all_sums)
        counter_ref[index] = 0


def add_bias(sums: Sequence[jax.Array], bias_ref, block: ColumnBlock, spec: ProductSpec) -> list[jax.Array]:
    """The parts' sums and the columns' biases."""
    mask, other = (None, None) if block.real is None else (block.real, 0)
    biases = [
        plgpu.load(bias_ref.at[part * spec.part_stride + block.column], mask=mask, other=other)
        for part in range(spec.parts)
    ]
    return [total + bias.astype(jnp.float32)[None, :] for total, bias in zip(sums, biases, strict=True)]


def _matrix_product(refs, block, first_step, steps, spec: ProductSpec):
    """Sums of squares `[row_tile]` and one `[row_tile, block_columns]` product a part."""
    walk = functools.partial(_matrix_step, refs, block, first_step, spec)
    shape = (spec.row_tile, spec.tiles.block_columns)
    zeros = [jnp.zeros(shape[::-1] if spec.tiles.transposed else shape, jnp.float32)] * spec.parts
    squares, *sums = lax.fori_loop(0, steps, walk, (jnp.zeros((spec.row_tile,), jnp.float32), *zeros))
    return squares, *(total.T if spec.tiles.transposed else total for total in sums)


def _vector_product(refs, block, first_step, steps, spec: ProductSpec):
    """The same on the vector units."""
    shape = (spec.tiles.block_inner, spec.tiles.block_columns)
    walk = functools.partial(_vector_step, refs, block, first_step, spec)
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


def _vector_step(refs, block, first_step, spec: ProductSpec, index, carry):
    x_ref, weight_ref, norm_ref, scaled_ref = refs
    squares, sums = (list(values) for values in carry)
    inner = (first_step + index) * spec.tiles.block_inner + jnp.arange(spec.tiles.block_inner, dtype=jnp.int32)
    weights = [weight.astype(jnp.float32) for weight in _load_weights(weight_ref, inner, block, spec)]
    held = None if spec.whole else inner < spec.inner
    other = None if spec.whole else 0
    if norm_ref is not None:
        scale = plgpu.load(norm_ref.at[inner], mask=held, other=other).astype(jnp.float32)
    for m in range(spec.rows):
        x = plgpu.load(x_ref.at[m, inner], mask=held, other=other).astype(jnp.float32)
        if norm_ref is not None:
            squares[m] = squares[m] + x * x
            scaled = (x * scale).astype(x_ref.dtype)
            if scaled_ref is not None:
                plgpu.store(scaled_ref.at[m, inner], scaled, mask=held)
            x = scaled.astype(jnp.float32)
        for part, weight in enumerate(weights):
            place = m * spec.parts + part
            sums[place] = sums[place] + x[:, None] * weight
    return squares, sums


def _load_weights(weight_ref, inner, block: ColumnBlock, spec: ProductSpec) -> list[jax.Array]:
    """The weight tile of each part."""
    mask = other = None
    if not spec.whole or block.real is not None:
        mask, other = (inner < spec.inner)[:, None] & block.inside[None, :], 0
    starts = [part * spec.part_stride for part in range(spec.parts)]
    return [
        plgpu.load(weight_ref.at[inner[:, None], start + block.column[None, :]], mask=mask, other=other)
        for start in starts
    ]


def _matrix_step(refs, block, first_step, spec: ProductSpec, index, carry):
    """Adds one `[row_tile, block_inner] @ [block_inner, block_columns]` product a part."""
    x_ref, weight_ref, norm_ref, scaled_ref = refs
    squares, *sums = carry
    row = jnp.arange(spec.row_tile, dtype=jnp.int32)
    inner = (first_step + index) * spec.tiles.block_inner + jnp.arange(spec.tiles.block_inner, dtype=jnp.int32)
    held = jnp.full(inner.shape, True) if spec.whole else inner < spec.inner
    at, inside = (row[:, None], inner[None, :]), (row < spec.rows)[:, None] & held[None, :]
    x = plgpu.load(x_ref.at[at], mask=inside, other=0)
    if norm_ref is not None:
        wide = x.astype(jnp.float32)
        squares = squares + jnp.sum(wide * wide, axis=1)
        scale = plgpu.load(norm_ref.at[inner], mask=held, other=0).astype(jnp.float32)
        x = (wide * scale[None, :]).astype(x.dtype)
        if scaled_ref is not None:
            plgpu.store(scaled_ref.at[at], x, mask=inside)
    for part, weight in enumerate(_load_weights(weight_ref, inner, block, spec)):
        product = tile_dot(weight, x, trans_a=True, trans_b=True) if spec.tiles.transposed else tile_dot(x, weight)
        sums[part] = sums[part] + product
    return squares, *sums
