"""Pairs of a token and an expert, dealt into tiles of one expert each: rows of a product that masks nothing."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class PairTiles(NamedTuple):
    """Pairs by expert, each expert's from a new tile on."""

    source: jax.Array  # int32 [R], the pair of each row; any where it has none
    place: jax.Array  # int32 [P], the row of each pair; R for pairs without an expert
    expert: jax.Array  # int32 [tiles]
    live_tiles: jax.Array  # int32 [1]


def tile_pairs(ids: jax.Array, experts: int, tile: int) -> PairTiles:
    """Deals pairs into tiles of one expert each.

    Args:
        ids: int32 `[P]`, the expert of each pair; -1 for none.
        experts: E.
        tile: rows of a tile.
    """
    pairs = ids.shape[0]
    tiles = pairs // tile + min(experts, pairs)
    counts = jnp.sum(ids[:, None] == jnp.arange(experts, dtype=jnp.int32)[None, :], axis=0, dtype=jnp.int32)
    tile_ends = jnp.cumsum(-(-counts // tile), dtype=jnp.int32)
    number = jnp.arange(tiles, dtype=jnp.int32)
    of_tile = jnp.sum(number[:, None] >= tile_ends[None, :], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(of_tile, experts - 1)
    # What takes an expert's pairs from the order by expert to rows.
    shift = (tile_ends - -(-counts // tile)) * tile - (jnp.cumsum(counts, dtype=jnp.int32) - counts)
    key = jnp.where(ids < 0, experts, ids)
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    row = jnp.arange(tiles * tile, dtype=jnp.int32) - jnp.repeat(shift[expert], tile)
    position = jnp.zeros(pairs, jnp.int32).at[order].set(jnp.arange(pairs, dtype=jnp.int32), unique_indices=True)
    place = position + shift[jnp.minimum(key, experts - 1)]
    return PairTiles(
        source=order[jnp.clip(row, 0, pairs - 1)],
        place=jnp.where(ids < 0, tiles * tile, place),
        expert=expert,
        live_tiles=tile_ends[-1:],
    )
