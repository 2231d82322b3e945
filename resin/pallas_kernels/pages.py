"""Keys and values in the pages of the arena, and what scores are made of: what both paged kernels share.

Arena layout: `[num_pages, page_elements]`. A layer's keys are `[kv_heads, page_entries, head_dim]`, `key_row` rows of
head_dim elements after the start of a page; its values likewise at `value_row`. Rows are addressed as
`page * (page_elements / head_dim) + row`, which stays below 2^31 where element indices do not. Both offsets are
operands, not constants, so that all layers of a model share one compiled kernel. Vectors of 8-bit floats take half the
elements and come in two pieces (`fp8`): scores are the sum of two products, and sums of values are two tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from resin.pallas_kernels.fp8 import check_kernel_arena, row_elements
from resin.pallas_kernels.tiles import load_rows, piece_lanes


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedSpec:
    """What is static about one call; kernels add how they cut the work."""

    group: int  # query heads a KV head
    width: int  # of a piece
    pieces: int
    page_entries: int
    rows_per_page: int
    scale: float
    value_scale: float
    window: int | None
    has_sinks: bool
    softcap: float | None
    with_lse: bool
    interpret: bool

    @property
    def columns(self) -> int:
        """Width of a piece, rounded up to a power of two."""
        return pl.next_power_of_2(self.width)

    def lanes(self, piece: int) -> jax.Array:
        """Columns of q, of the result and of partial sums that belong to a piece."""
        return piece_lanes(piece, self.width, jnp.arange(self.columns, dtype=jnp.int32))


def paged_sizes(
    arena: jax.Array, heads: int, width: int, kv_heads: int, scale: float, fp8_scale: float | None
) -> dict[str, Any]:
    """Fields of a `PagedSpec`: what lies in the arena.

    Args:
        arena: `[num_pages, page_elements]`.
        heads, width: of the queries.
        kv_heads, scale, fp8_scale: as in `paged_decode_attention`.

    Raises:
        InvalidRequest: 8-bit vectors that kernels cannot read.
    """
    check_kernel_arena(arena.dtype, fp8_scale)
    elements = row_elements(width, arena.dtype, fp8_scale)
    return {
        "group": heads // kv_heads,
        "width": elements,
        "pieces": width // elements,
        "rows_per_page": arena.shape[1] // elements,
        "scale": scale if fp8_scale is None else scale * fp8_scale,
        "value_scale": fp8_scale or 1.0,
    }


def load_block(
    arena_ref, pages: jax.Array, entry: jax.Array, head: jax.Array, inside: jax.Array | None, planes_ref, dtype, spec
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Keys and values of one block, in pieces.

    Args:
        arena_ref: `[rows, elements]`.
        pages: int32 `[keys]`, where each lies.
        entry: int32 `[keys]`, counted from the sequence's first page.
        head: KV head.
        inside: bool `[keys, columns]`, what is real; None for all.
        planes_ref: rows from a page's start to keys and values.
        dtype: of the queries.
        spec: `PagedSpec` of the call.
    """
    lanes = jnp.arange(spec.columns, dtype=jnp.int32)
    rows = pages * spec.rows_per_page + head * spec.page_entries + entry % spec.page_entries
    keys, values = (
        load_rows(arena_ref, rows + planes_ref[plane], lanes, inside, dtype, spec.pieces > 1) for plane in (0, 1)
    )
    return keys, values
