"""Attention block of keys by block of keys: the sums of a tile of query rows, and what becomes of them.

A row has three sums: the largest score so far (times log2 e), that of 2^(score - top), and that of values weighted so.
At the end the kernel makes of them what a merge of several key sets would, had it this one alone: the mean of the
values, with a sink's exp(sink) in the denominator, and its logarithm.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from resin.pallas_kernels.pages import PagedSpec
from resin.pallas_kernels.tiles import LOG2E, MASKED, NO_TOP, exp2_affine, tile_dot

LN2 = math.log(2.0)


class Sums(NamedTuple):
    """Of the rows of a tile."""

    top: jax.Array  # float32 [rows]
    total: jax.Array  # float32 [rows]
    out: tuple[jax.Array, ...]  # float32 [rows, columns], one a piece of the values


def no_sums(rows: int, spec: PagedSpec) -> Sums:
    """Of rows that have seen no key."""
    return Sums(
        jnp.full((rows,), NO_TOP, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        (jnp.zeros((rows, spec.columns), jnp.float32),) * spec.pieces,
    )


def add_block(
    sums: Sums, scores: jax.Array, seen: jax.Array | None, values: tuple[jax.Array, ...], spec: PagedSpec
) -> Sums:
    """Adds one block of keys.

    Args:
        sums: of the blocks before.
        scores: float32 `[rows, keys]`, products of queries and keys.
        seen: bool, broadcasts to scores; None if every row sees every key.
        values: `[keys, columns]` each.
        spec: of the call.
    """
    factor = spec.scale * LOG2E
    if spec.softcap is not None:
        scores = jnp.tanh(scores * (spec.scale / spec.softcap))
        factor = spec.softcap * LOG2E
    if seen is not None:
        scores = jnp.where(seen, scores, MASKED)
    top = jnp.maximum(sums.top, jnp.max(scores, axis=1) * factor)
    weights = exp2_affine(scores, factor, top[:, None], interpret=spec.interpret)
    keep = exp2_affine(sums.top, 1.0, top, interpret=spec.interpret)
    total = sums.total * keep + jnp.sum(weights, axis=1)
    weights = weights.astype(values[0].dtype)
    pairs = zip(sums.out, values, strict=True)
    return Sums(top, total, tuple(part * keep[:, None] + tile_dot(weights, value) for part, value in pairs))


def finish(sums: Sums, sinks: jax.Array | None, spec: PagedSpec) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """The rows' results, a piece each, and float32 `[rows]` of their denominators' logarithms if the call wants them.

    Rows that have seen no key and have no sink give zeros, and -inf.
    """
    top, total, out = sums
    lse = top * LN2 + jnp.log(total) if spec.with_lse else None
    if sinks is not None:
        total = total + jnp.exp2(sinks * LOG2E - top)
        if lse is not None:
            high = jnp.maximum(lse, sinks)
            lse = high + jnp.log(jnp.exp(lse - high) + jnp.exp(sinks - high))
    out = tuple(part / jnp.where(total > 0, total, 1.0)[:, None] for part in out)
    if spec.value_scale != 1.0:
        out = tuple(part * spec.value_scale for part in out)
    return out, lse
