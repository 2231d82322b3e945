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
from resin.runtime.drafting import count_ready
from resin.runtime.slots import SlotTable

Columns = Mapping[str, jax.Array]


def derive(
    columns: Columns, slots: SlotTable, bucket: Bucket, specs: Sequence[tuple[CacheGroup, GroupGeometry]]
) -> tuple[dict[str, jax.Array], Tokens]:
    """The plan's columns with what follows from them, and its tokens.

    Added: `live_tokens` [B], how many of a sequence's tokens are not padding; `seq_lens` [B], tokens of each sequence
    after the step if all of them hold, 0 for padding; `draws` [B * width], position of the token that is drawn at each
    place; `state_copy` [B], which copy of its States a decoding row goes on from; `positions` [T]; `append_pages:g` and
    `append_offsets:g` [T] of every History and Window group g.
    """
    indptr = columns["query_indptr"]
    if bucket.phase is Phase.DECODE:
        before, tokens = decode_tokens(columns, slots, bucket)
        live = tokens.live.reshape(bucket.sequences, -1).sum(axis=1, dtype=jnp.int32)
        lengths = jnp.where(live > 0, before + live, 0)
        draws = (before[:, None] + 1 + jnp.arange(bucket.width, dtype=jnp.int32)[None, :]).reshape(-1)
    else:
        tokens, live = prefill_tokens(columns, bucket), indptr[1:] - indptr[:-1]
        draws = lengths = columns["computed"] + live
    derived = {**columns, "positions": tokens.positions, "seq_lens": lengths, "live_tokens": live, "draws": draws}
    derived["state_copy"] = slots.latest[columns["slots"], 2]
    for group, fill in specs:
        if not isinstance(group, StateGroup):
            pages, offsets = places_of(columns, group, fill, tokens)
            derived |= {f"append_pages:{group.name}": pages, f"append_offsets:{group.name}": offsets}
    return derived, tokens


def decode_tokens(columns: Columns, slots: SlotTable, bucket: Bucket) -> tuple[jax.Array, Tokens]:
    """Tokens of each sequence before the plan, int32 [B], and the plan's: each row's latest, then its drafts."""
    is_row = columns["computed"] > 0  # nothing at an empty place
    from_slot = (columns["row_flags"] & RowFlag.FROM_SLOT) != 0
    latest = slots.latest[columns["slots"]]
    ids = jnp.where(from_slot, latest[:, 0], columns["token_ids"][:: bucket.width])[:, None]
    before = jnp.where(is_row, jnp.where(from_slot, latest[:, 1], columns["computed"]), 0)
    live = is_row[:, None]
    if bucket.width > 1:
        assert slots.drafting is not None
        drafts = slots.drafting.tokens[columns["slots"]]
        tried = jnp.minimum(count_ready(drafts), columns["drafts"])[:, None]
        ids = jnp.concatenate([ids, jnp.maximum(drafts, 0)], axis=1)
        live = live & (jnp.arange(bucket.width, dtype=jnp.int32)[None, :] <= tried)
    places = jnp.arange(bucket.width, dtype=jnp.int32)[None, :]
    positions = jnp.where(live, before[:, None] + places, 0)
    row = jnp.arange(bucket.tokens, dtype=jnp.int32) // bucket.width
    return before, Tokens(ids.reshape(-1), positions.reshape(-1), row, live.reshape(-1))


def prefill_tokens(columns: Columns, bucket: Bucket) -> Tokens:
    """Ids, positions and sequences of a prefill plan's tokens."""
    indptr, at = columns["query_indptr"], jnp.arange(bucket.tokens, dtype=jnp.int32)
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
