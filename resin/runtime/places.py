"""Positions, lengths and destinations of a plan's tokens, derived from its columns and the slot table.

A plan says how many tokens a sequence had before it and which pages it holds. What a row that takes its token from its
slot had before, the slot knows: the host plans such a row before it knows what the step in flight leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from resin.models.tokens import Tokens
from resin.plan import Bucket, CacheGroup, GroupGeometry, HistoryGroup, Phase, RowFlag, StateGroup, WindowGroup
from resin.runtime.slots import SlotTable

Columns = Mapping[str, jax.Array]


def derive(
    columns: Columns, slots: SlotTable, bucket: Bucket, specs: Sequence[tuple[CacheGroup, GroupGeometry]]
) -> tuple[dict[str, jax.Array], Tokens]:
    """The plan's columns with what follows from them, and its tokens.

    Added: `seq_lens` [B], tokens of each sequence after the step, 0 for padding; `positions` [T]; `append_pages:g` and
    `append_offsets:g` [T] of every History and Window group g.
    """
    tokens, indptr = tokens_of(columns, slots, bucket), columns["query_indptr"]
    if bucket.phase is Phase.DECODE:
        lengths = jnp.where(tokens.live, tokens.positions + 1, 0)
    else:
        lengths = columns["computed"] + indptr[1:] - indptr[:-1]
    derived = {**columns, "positions": tokens.positions, "seq_lens": lengths}
    for group, fill in specs:
        if not isinstance(group, StateGroup):
            pages, offsets = places_of(columns, group, fill, tokens)
            derived |= {f"append_pages:{group.name}": pages, f"append_offsets:{group.name}": offsets}
    return derived, tokens


def tokens_of(columns: Columns, slots: SlotTable, bucket: Bucket) -> Tokens:
    """Ids, positions and sequences of the plan's tokens."""
    at = jnp.arange(bucket.tokens, dtype=jnp.int32)
    if bucket.phase is Phase.DECODE:  # one token a sequence
        live = columns["computed"] > 0  # nothing at an empty place
        from_slot = (columns["row_flags"] & RowFlag.FROM_SLOT) != 0
        latest = slots.latest[columns["slots"]]
        ids = jnp.where(from_slot, latest[:, 0], columns["token_ids"])
        before = jnp.where(from_slot, latest[:, 1], columns["computed"])
        return Tokens(ids, jnp.where(live, before, 0), at, live)
    indptr = columns["query_indptr"]
    row = jnp.minimum(_row_of(indptr, at), bucket.sequences - 1)
    live = at < indptr[-1]
    positions = jnp.where(live, (columns["computed"] - indptr[:-1])[row] + at, 0)
    return Tokens(columns["token_ids"], positions, row, live)


def places_of(
    columns: Columns, group: HistoryGroup | WindowGroup, fill: GroupGeometry, tokens: Tokens
) -> tuple[jax.Array, jax.Array]:
    """Where a group keeps the entry of each token.

    Returns:
        int32 [T] pages and offsets; page 0, which is scratch, takes what belongs nowhere: padding, and tokens that
        complete no entry.
    """
    ratio, position, row = group.tokens_per_entry, tokens.positions, tokens.row
    held = tokens.live if ratio == 1 else tokens.live & (lax.rem(position + 1, ratio) == 0)
    first = columns[f"first_position:{group.name}"][row] if isinstance(group, WindowGroup) else 0
    at = columns[f"page_indptr:{group.name}"][row] + lax.div(position - first, fill.span_tokens)
    pages = columns[f"page_ids:{group.name}"].at[jnp.where(held, at, 0)].get(mode="clip")
    offsets = lax.rem(lax.div(position, ratio), fill.page_entries)
    return jnp.where(held, pages, 0), jnp.where(held, offsets, 0)


def _row_of(indptr: jax.Array, at: jax.Array) -> jax.Array:
    """The sequence that owns each place: how many end before it or there. One kernel, where a search is many."""
    return jnp.sum(at[:, None] >= indptr[None, 1:], axis=1, dtype=jnp.int32)
