"""Mixture-of-experts feed-forward in bfloat16: out[t] = sum_k weight[t, k] * down_e(act(gate_e x[t]) * up_e x[t]).

Two grouped products (gate and up with the activation; down with the routing weight) around one array of
(token, choice) pairs, then a sum over the choices and the residual: three kernels beside the router's. T tokens,
E experts, k choices a token, P = T * k pairs. Only experts that some token chose are read.

Few pairs (decode): grid (column blocks, min(P, E)). A program takes the expert of its slot, finds that expert's pairs
by scanning all P ids in registers, and stops if an earlier slot has the same expert: no sort, no lists in memory.
Many pairs (prefill): pairs are sorted by expert outside and cut into row tiles of one expert each; grid (column blocks,
tiles).

The norm before the experts costs no pass of its own: `route_tokens` leaves x times its weight and one factor a row,
which the first product applies to its sums. Scaling x on the way in, as dense products do, took 24 us where this takes
15 (one token, 128 experts of 2048 x 768): a short walk over K cannot hide it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from resin.pallas_kernels.gates import SILU, Gate
from resin.pallas_kernels.tiles import NOWHERE, tile_dot

SCAN_PAIRS = 512  # above it a 16 x P comparison no longer fits the registers


@dataclass(frozen=True, slots=True)
class GroupedTiles:
    """Rows, columns and inner values a tile, warps and pipeline depth."""

    rows: int
    block_columns: int
    block_inner: int
    num_warps: int
    num_stages: int


# Measured on an H200 with 128 experts, top-8, 2048 x 768 in bfloat16, gate-up and down: at 1 token 0.83 and 0.71 of
# copy bandwidth, at 32 tokens 1.02 and 0.96, at 64 tokens 1.02 and 0.93; at 4096 tokens 0.53 and 0.49 of the matmul
# rate.
SCAN_TILES = GroupedTiles(16, 64, 64, num_warps=4, num_stages=6)
SCAN_TILES_DOWN = GroupedTiles(16, 128, 64, num_warps=4, num_stages=5)
SORTED_TILES = GroupedTiles(128, 128, 64, num_warps=8, num_stages=4)
SORTED_TILES_DOWN = GroupedTiles(128, 256, 64, num_warps=8, num_stages=3)


class SortedPairs(NamedTuple):
    """Pairs by expert and their row tiles; entries past `live_tiles` are padding."""

    pairs: jax.Array  # int32 [P]
    live_tiles: jax.Array  # int32 [1]
    expert: jax.Array  # int32 [tiles]
    start: jax.Array  # int32 [tiles], first place in `pairs`
    end: jax.Array  # int32 [tiles], end of the expert's places


def expert_ffn(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    gate: Gate = SILU,
    biases: tuple[jax.Array, jax.Array] | None = None,
    factor: jax.Array | None = None,
    residual: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The chosen experts' gated feed-forward of every token, weighted, added up and added to the residual.

    Args:
        x: `[T, D]`.
        expert_ids: int32 `[T, k]`, distinct within a token; -1 for none.
        expert_weights: float32 `[T, k]`.
        gate_up: `[E, D, 2 F]`, gate columns then up columns.
        down: `[E, F, D]`.
        gate: of the gate and the up half.
        biases: `[E, 2 F]` and `[E, D]` added to the products; None for none.
        factor: float32 `[T]` of each row of x; None for 1.
        residual: `[T, D]` added to the result; None for none.
        interpret: run the kernel bodies in Pallas' interpreter.

    Returns:
        `[T, D]` in x's dtype.
    """
    tokens, choices = expert_ids.shape
    pairs = tokens * choices
    ids, weights = expert_ids.reshape(pairs), expert_weights.reshape(pairs).astype(jnp.float32)
    scan = pairs <= SCAN_PAIRS
    first, second = (SCAN_TILES, SCAN_TILES_DOWN) if scan else (SORTED_TILES, SORTED_TILES_DOWN)
    up_bias, down_bias = biases or (None, None)
    inner = grouped_product(
        x, gate_up, ids, choices, first, gate=gate, bias=up_bias, factor=factor, interpret=interpret
    )
    out = grouped_product(inner, down, ids, 1, second, bias=down_bias, scale=weights, interpret=interpret)
    # Rows of pairs without an expert are undefined.
    parts = jnp.where((expert_ids >= 0)[:, :, None], out.reshape(tokens, choices, -1), 0)
    total = parts.sum(axis=1, dtype=jnp.float32)
    return (total if residual is None else residual.astype(jnp.float32) + total).astype(x.dtype)


def grouped_product(
    x: jax.Array,
    weight: jax.Array,
    ids: jax.Array,
    pairs_per_row: int,
    tiles: GroupedTiles,
    *,
    gate: Gate | None = None,
    bias: jax.Array | None = None,
    scale: jax.Array | None = None,
    factor: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """`out[p] = f(factor[r] * x[r] @ weight[ids[p]] + bias[ids[p]])` with `r = p // pairs_per_row`, for every pair.

    Args:
        x: `[P / pairs_per_row, K]`.
        weight: `[E, K, N]` in x's dtype; with `gate`, gate columns then up columns.
        ids: int32 `[P]`, expert of each pair; pairs of -1 take none, and their results are undefined.
        pairs_per_row: consecutive pairs that share a row of x.
        tiles: how the work is cut; more than 16 rows sort the pairs first.
        gate: joins both halves of the result.
        bias: `[E, N]`; None for none.
        scale: float32 `[P]` factor of each result.
        factor: float32 `[P / pairs_per_row]` of each row of x, before the activation.
        interpret: run the kernel body in Pallas' interpreter.

    Returns:
        `[P, N]` or, gated, `[P, N / 2]`, in x's dtype.
    """
    experts, inner, columns = weight.shape
    spec = _Spec(
        pairs=ids.shape[0],
        experts=experts,
        inner=inner,
        columns=columns // 2 if gate else columns,
        pairs_per_row=pairs_per_row,
        gate=gate,
        tiles=tiles,
        scan=ids.shape[0] <= SCAN_PAIRS,
        interpret=interpret,
    )
    lists = ids if spec.scan else sort_pairs(ids, experts, tiles.rows)
    return _call(spec, _Operands(x, weight, lists, bias, scale, factor))


def sort_pairs(ids: jax.Array, experts: int, tile_rows: int) -> SortedPairs:
    """Sorts pairs by expert (stable) and cuts each expert's share into tiles; pairs of -1 come last, in none."""
    pairs = ids.shape[0]
    order = jnp.argsort(jnp.where(ids < 0, experts, ids), stable=True).astype(jnp.int32)
    index = jnp.arange(experts, dtype=jnp.int32)
    counts = jnp.sum(ids[:, None] == index[None, :], axis=0, dtype=jnp.int32)
    place_ends = jnp.cumsum(counts, dtype=jnp.int32)
    tile_ends = jnp.cumsum(-(-counts // tile_rows), dtype=jnp.int32)
    tile = jnp.arange(pairs // tile_rows + min(experts, pairs), dtype=jnp.int32)
    expert = jnp.minimum(jnp.sum(tile[:, None] >= tile_ends[None, :], axis=1, dtype=jnp.int32), experts - 1)
    first_tile = tile_ends[expert] - -(-counts[expert] // tile_rows)
    start = place_ends[expert] - counts[expert] + (tile - first_tile) * tile_rows
    return SortedPairs(order, tile_ends[-1:], expert, start, place_ends[expert])


class _Operands(NamedTuple):
    """Arrays of a call or, in the kernel, their references."""

    x: Any
    weight: Any
    lists: Any  # the pairs' experts, or SortedPairs
    bias: Any
    scale: Any
    factor: Any


@dataclass(frozen=True, slots=True)
class _Spec:
    """Everything static about one call."""

    pairs: int
    experts: int
    inner: int
    columns: int
    pairs_per_row: int
    gate: Gate | None
    tiles: GroupedTiles
    scan: bool
    interpret: bool

    @property
    def by_slot(self) -> bool:
        """Scan: a program a pair rather than an expert."""
        return self.pairs < self.experts


@functools.partial(jax.jit, static_argnums=0)
def _call(spec: _Spec, operands: _Operands):
    """The kernel call. Nested jit: the layers of a model trace and lower it once."""
    inputs, structure = jax.tree.flatten(operands)
    programs = min(spec.pairs, spec.experts) if spec.scan else operands.lists.expert.shape[0]
    return pl.pallas_call(
        functools.partial(_kernel, spec=spec, structure=structure),
        grid=(-(-spec.columns // spec.tiles.block_columns), programs),
        out_shape=jax.ShapeDtypeStruct((spec.pairs, spec.columns), operands.x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=spec.tiles.num_warps, num_stages=spec.tiles.num_stages),
        interpret=spec.interpret,
        name="grouped_product",
    )(*inputs)


def _kernel(*refs, spec: _Spec, structure):
    *held, out_ref = refs
    (_scan_kernel if spec.scan else _sorted_kernel)(jax.tree.unflatten(structure, held), out_ref, spec)


def _scan_kernel(operands: _Operands, out_ref, spec: _Spec) -> None:
    ids_ref = operands.lists
    block, slot = pl.program_id(0), pl.program_id(1)
    pair = jnp.arange(pl.next_power_of_2(spec.pairs), dtype=jnp.int32)
    ids = plgpu.load(ids_ref.at[pair], mask=pair < spec.pairs, other=-1)
    expert = ids_ref[slot] if spec.by_slot else slot
    mine = ids == expert
    count = jnp.sum(mine.astype(jnp.int32))
    leads = count > 0
    if spec.by_slot:
        leads = (jnp.min(jnp.where(mine, pair, NOWHERE)) == slot) & (expert >= 0)
    rank = jnp.cumsum(mine.astype(jnp.int32)) - 1
    rank = jnp.where(mine, rank, -1)

    @pl.when(leads)
    def _():
        def tile(index, _):
            wanted = index * spec.tiles.rows + jnp.arange(spec.tiles.rows, dtype=jnp.int32)
            found = jnp.sum(jnp.where(rank[None, :] == wanted[:, None], pair[None, :], 0), axis=1)
            _product(operands, out_ref, expert, found, wanted < count, block, spec)
            return _

        lax.fori_loop(0, pl.cdiv(count, spec.tiles.rows), tile, 0)


def _sorted_kernel(operands: _Operands, out_ref, spec: _Spec) -> None:
    lists = operands.lists
    block, tile = pl.program_id(0), pl.program_id(1)

    @pl.when(tile < lists.live_tiles[0])
    def _():
        place = lists.start[tile] + jnp.arange(spec.tiles.rows, dtype=jnp.int32)
        live = place < lists.end[tile]
        pair = plgpu.load(lists.pairs.at[place], mask=live, other=0)
        _product(operands, out_ref, lists.expert[tile], pair, live, block, spec)


def _product(operands: _Operands, out_ref, expert, pair, live, block, spec: _Spec) -> None:
    """One row tile times one column block of an expert's weight, to the rows `pair` of the result."""
    x_ref, weight_ref, _, bias_ref, scale_ref, factor_ref = operands
    tiles = spec.tiles
    column = block * tiles.block_columns + jnp.arange(tiles.block_columns, dtype=jnp.int32)
    row = pair // spec.pairs_per_row
    parts = 2 if spec.gate else 1
    whole = spec.inner % tiles.block_inner == 0
    exact = whole and spec.columns % tiles.block_columns == 0

    def step(index, sums):
        inner = index * tiles.block_inner + jnp.arange(tiles.block_inner, dtype=jnp.int32)
        held = inner < spec.inner
        x = plgpu.load(x_ref.at[row[:, None], inner[None, :]], mask=live[:, None] & held[None, :], other=0)
        mask = None if exact else held[:, None] & (column < spec.columns)[None, :]
        other = None if exact else 0
        starts = [part * spec.columns for part in range(parts)]
        loaded = [
            plgpu.load(weight_ref.at[expert, inner[:, None], start + column[None, :]], mask=mask, other=other)
            for start in starts
        ]
        return tuple(total + tile_dot(x, weight) for total, weight in zip(sums, loaded, strict=True))

    zeros = tuple(jnp.zeros((tiles.rows, tiles.block_columns), jnp.float32) for _ in range(parts))
    sums = lax.fori_loop(0, -(-spec.inner // tiles.block_inner), step, zeros)
    if factor_ref is not None:
        factor = plgpu.load(factor_ref.at[row], mask=live, other=0.0)[:, None]
        sums = tuple(total * factor for total in sums)
    if bias_ref is not None:
        inside = column < spec.columns
        starts = [part * spec.columns for part in range(parts)]
        loaded = [plgpu.load(bias_ref.at[expert, start + column], mask=inside, other=0) for start in starts]
        sums = tuple(total + bias.astype(jnp.float32)[None, :] for total, bias in zip(sums, loaded, strict=True))
    out = sums[0] if spec.gate is None else spec.gate(sums[0], sums[1])
    if scale_ref is not None:
        out = out * plgpu.load(scale_ref.at[pair], mask=live, other=0.0)[:, None]
    place = jnp.where(live, pair, NOWHERE)
    inside = live[:, None] & (column < spec.columns)[None, :]
    plgpu.store(out_ref.at[place[:, None], column[None, :]], out.astype(out_ref.dtype), mask=inside)
