"""Mixture-of-experts feed-forward over MXFP4 weights: which kernels multiply how many tokens.

`out[t] = residual[t] + sum_k weight[t, k] * (down_e gate(gate_up_e x[t] + b_e) + c_e)`, T tokens, E experts, k choices
a token, P = T k pairs.

Few pairs: rows sorted by expert in one kernel, both products of `experts_mxfp4.py`, and a sum that gathers each token's
rows: four kernels beside the router's, three for one token, which needs no sorting. Many pairs: both products of
`experts_mxfp4_wgmma.py` on Hopper, of `experts_mxfp4_sorted.py` elsewhere.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from resin.pallas_kernels.experts import sort_pairs
from resin.pallas_kernels.experts_mxfp4 import FragmentTiles, SortedRows, packed_product, sort_rows
from resin.pallas_kernels.experts_mxfp4_sorted import SORTED, packed_sorted_product
from resin.pallas_kernels.gates import SILU, Gate
from resin.pallas_kernels.gpu import H200, Gpu
from resin.pallas_kernels.mxfp4 import PackedMatrices
from resin.pallas_kernels.pair_tiles import tile_pairs
from resin.pallas_kernels.route import NormedRows

FEW_PAIRS = 512  # most that the first way takes where the second is Triton's
HOPPER = 90
# Most pairs an expert, on average, that the first way takes on Hopper: 32 tokens with 4 of 32 experts each take 150 us
# there and 158 the second way, 128 tokens 296 and 185.
FEW_PAIRS_AN_EXPERT = 4


def packed_expert_ffn(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    gate_up: PackedMatrices,
    down: PackedMatrices,
    *,
    gate: Gate = SILU,
    biases: tuple[jax.Array, jax.Array] | None = None,
    factor: jax.Array | None = None,
    residual: jax.Array | None = None,
    gpu: Gpu = H200,
    interpret: bool = False,
) -> jax.Array:
    """The chosen experts' gated feed-forward of every token, weighted, added up and added to the residual.

    Args:
        x: bfloat16 `[T, D]`.
        expert_ids: int32 `[T, k]`, distinct within a token; -1 for none.
        expert_weights: float32 `[T, k]`.
        gate_up: E of `[2 F, D]`, tiles of eight gate rows and their eight up rows.
        down: E of `[D, F]`.
        gate: of the gate and the up half.
        biases: `[E, 2 F]`, gates then ups, and `[E, D]`; None for none.
        factor: float32 `[T]` of each row of x; None for 1.
        residual: `[T, D]` added to the result; None for none.
        gpu: what kernels are chosen for.
        interpret: run the kernel bodies in Pallas' interpreter.

    Returns:
        bfloat16 `[T, D]`.
    """
    tokens, choices = expert_ids.shape
    experts = gate_up.words.shape[0]
    up_bias, down_bias = biases or (None, None)
    is_hopper = gpu.arch == HOPPER and not interpret
    if is_hopper and tokens * choices > min(FEW_PAIRS_AN_EXPERT * experts, FEW_PAIRS):
        parts = _by_wgmma(NormedRows(x, factor).whole(), expert_ids, gate_up, down, gate, biases)
    elif tokens * choices > FEW_PAIRS:
        lists = sort_pairs(expert_ids.reshape(-1), experts, SORTED.pairs)
        x = NormedRows(x, factor).whole()
        inner = packed_sorted_product(x, gate_up, lists, choices, gate=gate, bias=up_bias, interpret=interpret)
        out = packed_sorted_product(inner, down, lists, 1, bias=down_bias, interpret=interpret)
        parts = out.reshape(tokens, choices, -1)
    else:
        rows, factor = _sorted(x, expert_ids, experts, factor, interpret)
        # The interpreter compiles what is unrolled: the smallest tiles will do.
        first, second, column_tiles = choose_tiles(1 if interpret else tokens)
        inner = packed_product(
            rows,
            gate_up,
            gate=gate,
            bias=up_bias,
            factor=factor,
            tiles=first,
            column_tiles=column_tiles,
            interpret=interpret,
        )
        out = packed_product(
            rows._replace(x=inner),
            down,
            bias=down_bias,
            tiles=second,
            column_tiles=column_tiles,
            interpret=interpret,
        )
        parts = out[rows.place.reshape(tokens, choices)]
    # Rows of pairs without an expert are undefined.
    parts = jnp.where((expert_ids >= 0)[:, :, None], parts, 0)
    total = jnp.sum(parts.astype(jnp.float32) * expert_weights.astype(jnp.float32)[:, :, None], axis=1)
    return (total if residual is None else residual.astype(jnp.float32) + total).astype(x.dtype)


def _by_wgmma(
    x: jax.Array,
    ids: jax.Array,
    gate_up: PackedMatrices,
    down: PackedMatrices,
    gate: Gate,
    biases: tuple[jax.Array, jax.Array] | None,
) -> jax.Array:
    """`[T, k, D]`, what each choice adds; undefined without an expert."""
    # Importing Mosaic GPU takes 0.4 s.
    from resin.pallas_kernels.experts_mxfp4_wgmma import choose_wgmma_tiles, wgmma_product
    from resin.pallas_kernels.mxfp4_registers import deal_columns

    up_bias, down_bias = biases or (None, None)
    experts = gate_up.words.shape[0]
    tiles = choose_wgmma_tiles(ids.size, experts)
    pairs = tile_pairs(ids.reshape(-1), experts, tiles.pairs)
    rows = deal_columns(x)[pairs.source // ids.shape[1]]
    inner = wgmma_product(rows, gate_up, pairs, gate=gate, bias=up_bias, tiles=tiles)
    return wgmma_product(inner, down, pairs, bias=down_bias, tiles=tiles)[pairs.place.reshape(ids.shape)]


def _sorted(
    x: jax.Array, ids: jax.Array, experts: int, factor: jax.Array | None, interpret: bool
) -> tuple[SortedRows, jax.Array | None]:
    """The rows of each expert, and the factor that they still lack."""
    if x.shape[0] > 1:
        return sort_rows(x, ids, experts, factor, interpret=interpret), None
    pair = jnp.arange(ids.shape[1], dtype=jnp.int32)
    return SortedRows(x, ids.reshape(-1), pair, pair + 1, pair), factor


# Measured on an H200, 32 experts of 5760 x 2880 and 2880 x 2880, 4 taken, us for both products: 27 at 1 token, 103 at
# 8, 151 at 32, 296 at 128.
def choose_tiles(tokens: int) -> tuple[FragmentTiles, FragmentTiles, int]:
    """Tiles of both products and their column tiles."""
    if tokens == 1:
        return FragmentTiles(1, 1), FragmentTiles(1, 2), 1
    if tokens <= 8:
        return FragmentTiles(1, 2), FragmentTiles(1, 2), 1
    return FragmentTiles(2, 1), FragmentTiles(2, 1), 2
